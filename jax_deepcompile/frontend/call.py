"""What the step is called with, as pytrees: NNX objects are taken apart before tracing and updated in place after."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_deepcompile import errors
from jax_deepcompile.frontend.signature import is_numeric
from jax_deepcompile.frontend.trace import argument_names


@dataclass(frozen=True)
class Argument:
    """A positional argument of a pure step.

    Attributes:
      name: what the user calls it.
      place: among the parameters of the user's step; None for the state of all NNX objects.
      has_objects: NNX objects are in it.
      has_arrays: and anything else is.
      is_key: it is a random key.
      has_optimizer: the state of an optax optimizer is in it.
      is_optimizer: and nothing else is.
      is_number: all of it are numbers: Python's, or integers such as the count of a step.
    """

    name: str
    place: int | None
    has_objects: bool = False
    has_arrays: bool = True
    is_key: bool = False
    has_optimizer: bool = False
    is_optimizer: bool = False
    is_number: bool = False


@dataclass(frozen=True)
class PureStep:
    """The user's step as a pure function, for one way to call it.

    Attributes:
      fun: on pytrees of arrays. With NNX objects it is ``(state, *args, **kwargs) -> (state, out)``.
      arguments: its positional arguments.
      structure: what tells calls apart that pytrees do not; hashable.
    """

    fun: Callable
    arguments: tuple[Argument, ...]
    structure: Any = None


@dataclass(frozen=True)
class PureCall:
    """A call of the user's step as a call of a pure function on pytrees.

    Attributes:
      step: the function.
      args: its positional arguments: the state of all NNX objects, if there are any, and what the user's step has
        parameters for, NNX objects left out.
      kwargs: what the user's step takes under any name.
      objects: the NNX objects that the state is of.
    """

    step: PureStep
    args: tuple
    kwargs: dict
    objects: tuple = ()

    def finish(self, state: Any, out: Any) -> Any:
        """What the user's step would have returned; the user's NNX objects get the values of ``state``."""
        nnx.update(self.objects, _with_values(state))
        if not any(map(_is_reference, jax.tree.leaves(out, is_leaf=_is_reference))):
            return out
        given = dict(nnx.iter_graph(self.objects))
        return jax.tree.map(lambda node: given[node.path] if _is_reference(node) else node, out, is_leaf=_is_reference)


def bind(fun: Callable, name: str, args: tuple, kwargs: dict) -> PureCall:
    """``fun(*args, **kwargs)`` as a pure call."""
    arranged, names, args, kwargs = _arranged(fun, args, kwargs)
    holders = tuple(map(_Holder.of, args))
    arguments = tuple(
        _argument(name, place, holder, value) for (name, place), holder, value in zip(names, holders, args, strict=True)
    )
    objects = tuple(found for value, holder in zip(args, holders, strict=True) for found in holder.objects(value))
    if not objects:
        return PureCall(PureStep(arranged, arguments), args, kwargs)
    with nnx.update_context("jax_deepcompile"):  # takes what nnx.cached_partial has for the step it calls
        graphdef, state = _split(objects)
    holding = [argument.name for argument in arguments if argument.has_objects]
    together = Argument(f"({', '.join(holding)})" if len(holding) > 1 else holding[0], None, True)
    rest = [holder.without_objects(value) for value, holder in zip(args, holders, strict=True)]
    pure = _purify(arranged, name, graphdef, holders)
    step = PureStep(pure, (together, *arguments), _Structure(graphdef, holders))
    return PureCall(step, (state, *rest), kwargs, objects)


def holds_objects(tree: Any) -> bool:
    """Whether ``tree`` is, or is a pytree that contains, an NNX object."""
    return _Holder.of(tree).count > 0


def _arranged(fun: Callable, args: tuple, kwargs: dict) -> tuple[Callable, list[tuple[str, int]], tuple, dict]:
    """``fun`` with all it has parameters for as positional arguments.

    Returns:
      The function, name and place of every argument, the arguments, and those that ``fun`` takes under any name.
    """
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return fun, [(name, place) for place, name in enumerate(argument_names(fun, len(args)))], args, kwargs
    if kwargs:
        bound = signature.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    names = [(name, place) for place, name in enumerate(argument_names(fun, len(args)))]
    parameters = enumerate(signature.parameters.items())
    places = {name: place for place, (name, parameter) in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    named = [name for name in places if name in kwargs]
    values = (*args, *(kwargs[name] for name in named))
    others = {name: value for name, value in kwargs.items() if name not in named}
    arranged = _with_names(fun, len(args), named) if named else fun
    return arranged, [*names, *((name, places[name]) for name in named)], values, others


def _with_names(fun: Callable, positional: int, named: Sequence[str]) -> Callable:
    def called(*args, **kwargs):
        return fun(*args[:positional], **dict(zip(named, args[positional:], strict=True)), **kwargs)

    return called


@dataclass(frozen=True)
class _Holder:
    """Where in an argument NNX objects are.

    Attributes:
      tree: structure of the argument, objects being leaves.
      slots: for each leaf whether it is an object.
    """

    tree: Any
    slots: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> _Holder:
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_opaque)
        return cls(tree, tuple(map(_is_object, leaves)))

    @property
    def count(self) -> int:
        return sum(self.slots)

    def objects(self, value: Any) -> list:
        if not self.count:
            return []
        return [leaf for leaf, is_object in zip(self.tree.flatten_up_to(value), self.slots, strict=True) if is_object]

    def without_objects(self, value: Any) -> Any:
        return self.with_objects(value, [None] * self.count)

    def with_objects(self, value: Any, objects: Sequence) -> Any:
        """``value`` with ``objects`` in their slots."""
        if not self.count:
            return value
        found = iter(objects)
        leaves = zip(self.tree.flatten_up_to(value), self.slots, strict=True)
        return self.tree.unflatten([next(found) if is_object else leaf for leaf, is_object in leaves])


def _is_key(value: Any) -> bool:
    """One random key, typed or, as ``jax.random.PRNGKey`` makes them, two or four raw words."""
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return False
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.shape == ()
    return value.dtype == jnp.uint32 and value.shape in ((2,), (4,))


def _argument(name: str, place: int, holder: _Holder, value: Any) -> Argument:
    nodes = jax.tree.leaves(value, is_leaf=_is_optimizer_state)
    optimizers = sum(map(_is_optimizer_state, nodes))
    return Argument(
        name,
        place,
        has_objects=holder.count > 0,
        has_arrays=holder.count < len(holder.slots),
        is_key=_is_key(value),
        has_optimizer=optimizers > 0,
        is_optimizer=optimizers == len(nodes) > 0,
        is_number=len(nodes) > 0 and all(map(_is_number, nodes)),
    )


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, (int, float, complex)):
        return True
    return is_numeric(leaf) and leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)


def _is_optimizer_state(node: Any) -> bool:
    """Optax keeps its state in named tuples of its own; and parameters, if there are two sets of them."""
    kind = type(node)
    is_optax = isinstance(node, tuple) and hasattr(kind, "_fields") and kind.__module__.split(".")[0] == "optax"
    return is_optax and kind is not optax.LookaheadParams


def _is_object(node: Any) -> bool:
    return isinstance(node, nnx.Pytree | nnx.Variable)


def _is_opaque(node: Any) -> bool:
    """An ``nnx.State`` is a value, the variables in it are not the user's objects."""
    return _is_object(node) or isinstance(node, nnx.State)


@dataclass(frozen=True)
class _Structure:
    """Of the NNX objects of a call, and of what they are in. What objects have as attributes need not be hashable."""

    graphdef: Any
    holders: tuple[_Holder, ...]

    def __hash__(self) -> int:
        return hash(self.holders)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """Stands, in the state of NNX objects, for a leaf that is no number, such as a dtype: it stays as it is."""

    value: Any

    def __hash__(self) -> int:
        return hash(type(self.value))


def _split(objects: Any) -> tuple[Any, Any]:
    """NNX ``objects`` as what they are made of and their state, whose leaves are numbers and arrays."""
    graphdef, state = nnx.split(objects)
    return graphdef, jax.tree.map(lambda leaf: leaf if is_numeric(leaf) else _Static(leaf), state)


def _with_values(state: Any) -> Any:
    """What ``nnx.split`` made, of the state that ``_split`` made."""
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
    paths = {id(node): path for path, node in nnx.iter_graph(objects) if _is_object(node)}
    return jax.tree.map(
        lambda node: _Reference(paths[id(node)]) if id(node) in paths else node, out, is_leaf=_is_opaque
    )


def _purify(fun: Callable, name: str, graphdef: Any, holders: Sequence[_Holder]) -> Callable:
    def pure(state, *args, **kwargs):
        objects = nnx.merge(graphdef, _with_values(state))
        waiting = list(objects)
        filled = []
        for value, holder in zip(args, holders, strict=True):
            filled.append(holder.with_objects(value, waiting[: holder.count]))
            del waiting[: holder.count]
        out = _with_references(fun(*filled, **kwargs), objects)
        after = _split(objects)[1]
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
        self.graphdef, state = _split(out)
        return state

    def finish(self, state: Any) -> Any:
        """What the user's function would have returned, holding ``state``."""
        return state if self.graphdef is None else nnx.merge(self.graphdef, _with_values(state))
