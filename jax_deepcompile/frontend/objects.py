"""NNX objects as pytrees: taken apart before a step is traced, put together inside of it, updated in place after."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import jit_info
from jax_deepcompile.frontend.signature import in_objects, is_numeric, structure_changes


def bound_to_objects(fun: Any) -> tuple[Callable, Any] | None:
    """The function and NNX objects of what is bound to them alone: a method, or what ``nnx.jit`` makes of one."""
    if isinstance(fun, types.MethodType):
        function, args = fun.__func__, (fun.__self__,)
    elif isinstance(fun, functools.partial) and jit_info(fun.func) is not None and not fun.keywords:
        function, args = fun.func, fun.args
    else:
        return None
    return (function, args[0]) if len(args) == 1 and holds_objects(args[0]) else None


def holds_objects(tree: Any) -> bool:
    """Whether ``tree`` is, or is a pytree that contains, an NNX object."""
    return Holder.of(tree).count > 0


@dataclass(frozen=True)
class Holder:
    """Where in an argument NNX objects are.

    Attributes:
      tree: structure of the argument, objects being leaves.
      slots: for each leaf whether it is an object.
    """

    tree: Any
    slots: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> Holder:
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_opaque)
        return cls(tree, tuple(map(_is_object, leaves)))

    @property
    def count(self) -> int:
        return sum(self.slots)

    def objects(self, value: Any) -> list:
        if not self.count:
            return []
        return [leaf for leaf, is_object in zip(self.tree.flatten_up_to(value), self.slots, strict=True) if is_object]

    def paths(self, value: Any) -> list[str]:
        """Where in ``value`` the objects are, such as ``['model']``."""
        leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_opaque)
        pairs = zip(leaves, self.slots, strict=True) if self.count else ()
        return [jax.tree_util.keystr(path) for (path, _), is_object in pairs if is_object]

    def without_objects(self, value: Any) -> Any:
        return self.with_objects(value, [None] * self.count)

    def with_objects(self, value: Any, objects: Sequence) -> Any:
        """``value`` with ``objects`` in their slots."""
        if not self.count:
            return value
        found = iter(objects)
        leaves = zip(self.tree.flatten_up_to(value), self.slots, strict=True)
        return self.tree.unflatten([next(found) if is_object else leaf for leaf, is_object in leaves])


def _is_object(node: Any) -> bool:
    return isinstance(node, nnx.Pytree | nnx.Variable)


def _is_opaque(node: Any) -> bool:
    """An ``nnx.State`` is a value, the variables in it are not the user's objects."""
    return _is_object(node) or isinstance(node, nnx.State)


@dataclass(frozen=True)
class Structure:
    """Of the NNX objects of a call, and of what they are in. What objects have as attributes need not be hashable."""

    graphdef: Any
    holders: tuple[Holder, ...]

    def __hash__(self) -> int:
        return hash(self.holders)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """Stands, in the state of NNX objects, for a leaf that is no number, such as a dtype: it stays as it is."""

    value: Any

    def __hash__(self) -> int:
        return hash(type(self.value))


def split(objects: Any) -> tuple[Any, Any]:
    """NNX ``objects`` as what they are made of and their state, whose leaves are numbers and arrays."""
    graphdef, state = nnx.split(objects)
    return graphdef, jax.tree.map(lambda leaf: leaf if is_numeric(leaf) else _Static(leaf), state)


def _with_values(state: Any) -> Any:
    """What ``nnx.split`` made, of the state that ``split`` made."""
    return jax.tree.map(lambda leaf: leaf.value if _is_static(leaf) else leaf, state, is_leaf=_is_static)


def _is_static(node: Any) -> bool:
    return isinstance(node, _Static)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Reference:
    """Stands, in what a pure step returns, for an NNX object that the step was given: the one at ``path``."""

    path: tuple


def _is_reference(node: Any) -> bool:
    return isinstance(node, _Reference)


def _with_references(out: Any, objects: tuple) -> Any:
    given = {id(node): _Reference(path) for path, node in nnx.iter_graph(objects) if _is_object(node)}
    return jax.tree.map(lambda node: given.get(id(node), node), out, is_leaf=_is_opaque)


def finish(objects: tuple, state: Any, out: Any) -> Any:
    """What the user's step would have returned; ``objects`` get the values of ``state``."""
    nnx.update(objects, _with_values(state))
    returned = {node.path for node in jax.tree.leaves(out, is_leaf=_is_reference) if _is_reference(node)}
    if not returned:
        return out
    given: dict = {(place,): node for place, node in enumerate(objects)}
    if not returned <= given.keys():
        given = dict(nnx.iter_graph(objects))
    return jax.tree.map(lambda node: given[node.path] if _is_reference(node) else node, out, is_leaf=_is_reference)


def purify(fun: Callable, name: str, graphdef: Any, holders: Sequence[Holder], names: Sequence[str]) -> Callable:
    """``fun``, called ``name``, of the state of objects, which have ``names``, and of all else.

    It returns None in the place of a state in which nothing is another value.
    """

    def pure(state, *args, **kwargs):
        objects = nnx.merge(graphdef, _with_values(state))
        waiting = list(objects)
        filled = []
        for value, holder in zip(args, holders, strict=True):
            filled.append(holder.with_objects(value, waiting[: holder.count]))
            del waiting[: holder.count]
        out = _with_references(fun(*filled, **kwargs), objects)
        after = split(objects)[1]
        if jax.tree.structure(after) != jax.tree.structure(state):
            changes = structure_changes(state, after, functools.partial(in_objects, names))
            raise errors.StateChangedError(name, changes)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
        return None if all(now is was for was, now in pairs) else after, out

    return pure


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
        self.graphdef, state = split(out)
        return state

    def finish(self, state: Any) -> Any:
        """What the user's function would have returned, holding ``state``."""
        return state if self.graphdef is None else nnx.merge(self.graphdef, _with_values(state))
