"""What the step is called with, as pytrees: NNX objects are taken apart before tracing and updated in place after."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jax_deepcompile import errors


@dataclass(frozen=True)
class PureCall:
    """A call of the user's step as a call of a pure function on pytrees.

    Attributes:
      fun: the pure function. With NNX objects it is ``(state, *rest) -> (state, out)``, else the user's own.
      args: its positional arguments.
      objects: positions of the NNX objects among the user's arguments; empty if there are none.
      structure: what tells calls apart that pytrees do not: the structure of the NNX objects.
    """

    fun: Callable
    args: tuple
    objects: tuple[int, ...] = ()
    structure: Any = None


def bind(fun: Callable, name: str, args: tuple) -> PureCall:
    """``fun(*args)`` as a pure call; all NNX objects together become its first argument."""
    objects = tuple(position for position, arg in enumerate(args) if holds_objects(arg))
    if not objects:
        return PureCall(fun, args)
    graphdef, state = nnx.split(tuple(args[position] for position in objects))
    rest = tuple(arg for position, arg in enumerate(args) if position not in objects)
    return PureCall(_purify(fun, name, graphdef, objects), (state, *rest), objects, graphdef)


def holds_objects(tree: Any) -> bool:
    """Whether ``tree`` is, or is a tuple, list or dict that contains, an NNX object."""
    if isinstance(tree, nnx.Pytree | nnx.Variable):
        return True
    if isinstance(tree, (tuple, list)):
        return any(map(holds_objects, tree))
    return isinstance(tree, dict) and any(map(holds_objects, tree.values()))


def update_objects(args: tuple, objects: tuple[int, ...], state: Any) -> None:
    """Gives the user's NNX objects the values of ``state``."""
    nnx.update(tuple(args[position] for position in objects), state)


def _purify(fun: Callable, name: str, graphdef: Any, objects: tuple[int, ...]) -> Callable:
    def pure(state, *rest, **kwargs):
        merged = nnx.merge(graphdef, state)
        args = list(rest)
        for position, value in zip(objects, merged, strict=True):
            args.insert(position, value)
        out = fun(*args, **kwargs)
        after = nnx.split(merged)[1]
        if jax.tree.structure(after) != jax.tree.structure(state):
            raise errors.StateChangedError(name, _differences(state, after))
        return after, out

    return pure


def _differences(before: Any, after: Any) -> list[str]:
    old, new = ({jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(t)} for t in (before, after))
    found = [f"{path} is missing" for path in sorted(old - new)] + [f"{path} is new" for path in sorted(new - old)]
    return found or ["the metadata of a variable differs"]


@dataclass
class Creation:
    """The user's function that creates the state, as a function to pytrees; remembers what NNX objects it made."""

    fun: Callable
    graphdef: Any = None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fun, updated=())

    def __call__(self, *args, **kwargs):
        out = self.fun(*args, **kwargs)
        if not holds_objects(out):
            return out
        self.graphdef, state = nnx.split(out)
        return state

    def finish(self, state: Any) -> Any:
        """What the user's function would have returned, holding ``state``."""
        return state if self.graphdef is None else nnx.merge(self.graphdef, state)
