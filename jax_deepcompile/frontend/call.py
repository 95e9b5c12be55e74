"""A call of the user's step as a call of a pure function on pytrees, with everything at a position."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import ArrayImpl, bound_axes
from jax_deepcompile.frontend.containers import opened
from jax_deepcompile.frontend.objects import Holder, Structure, finish, purify, split
from jax_deepcompile.frontend.signature import is_numeric, is_optimizer_state, is_raw_key
from jax_deepcompile.frontend.static_arguments import static_and_donated, without_static
from jax_deepcompile.ir.memory import HOST_KIND


@dataclass(frozen=True)
class Argument:
    """A positional argument of a pure step.

    Attributes:
      name: what the user calls it.
      position: among the parameters of the user's step; None for the state of all NNX objects.
      has_objects: NNX objects are in it.
      has_arrays: and anything else is.
      is_key: it is a random key, or several by name.
      has_optimizer: the state of an optax optimizer is in it.
      is_optimizer: and nothing else is.
      is_number: all of it are numbers: Python's, or integers such as the count of a step.
      is_donated: the step was jitted to have its memory.
    """

    name: str
    position: int | None
    has_objects: bool = False
    has_arrays: bool = True
    is_key: bool = False
    has_optimizer: bool = False
    is_optimizer: bool = False
    is_number: bool = False
    is_donated: bool = False


@dataclass(frozen=True)
class PureStep:
    """The user's step as a pure function, for one way to call it.

    Attributes:
      fun: on pytrees of arrays. With NNX objects it is ``(state, *args, **kwargs) -> (state, out)``.
      arguments: its positional arguments.
      structure: what tells calls apart that pytrees do not; hashable.
      static: names and values of what it was jitted with as static arguments; fixed in ``fun``.
      objects: what the user calls each NNX object, such as ``pair[0]``.
    """

    fun: Callable
    arguments: tuple[Argument, ...]
    structure: Any = None
    objects: tuple[str, ...] = ()
    static: tuple[tuple[str, Hashable], ...] = ()


@dataclass(frozen=True)
class PureCall:
    """A call of the user's step as a call of a pure function on pytrees.

    Attributes:
      args: its positional arguments: the state of all NNX objects, if there are any, and what the user's step has
        parameters for, NNX objects left out.
      kwargs: what the user's step takes under any name.
      objects: the NNX objects that the state is of.
    """

    step: PureStep
    args: tuple
    kwargs: dict
    objects: tuple = ()

    @property
    def inputs(self) -> tuple:
        """What is compiled takes: ``(*args, kwargs)``."""
        return (*self.args, self.kwargs)

    @property
    def form(self) -> Hashable:
        """What is alike in calls that run the same program: the structure of arguments, the type of every leaf, what is
        static, and what maps the step."""
        tree = jax.tree.structure((self.args, self.kwargs))
        static = tuple((name, type(value), value) for name, value in self.step.static)  # 1, 1.0 and True are equal
        return tree, self.step.structure, static, self.step.arguments, self.leaf_types, bound_axes()

    @property
    def leaf_types(self) -> tuple:
        return tuple(map(leaf_type, jax.tree.leaves((self.args, self.kwargs))))

    def without_values(self) -> PureCall:
        """The call with shapes in the place of arrays, and of no objects: nothing in it takes device memory. What is on
        the host says so."""

        def without_value(leaf: Any) -> Any:
            is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
            if not is_array or not is_numeric(leaf):
                return leaf
            return abstract(leaf).update(sharding=sharding_on_host(leaf))

        args, kwargs = jax.tree.map(without_value, opened((self.args, self.kwargs)))
        return replace(self, args=args, kwargs=kwargs, objects=())

    def finish(self, state: Any, out: Any) -> Any:
        """What the user's step would have returned; the user's NNX objects get the values of ``state``."""
        return finish(self.objects, state, out)


def bind(fun: Callable, name: str, args: tuple, kwargs: dict) -> PureCall:
    """``fun(*args, **kwargs)`` as a pure call.

    Raises:
      LeafTypeError: an argument is an iterator.
      StaticArgumentError: a static one has no hash.
    """
    static, donated = static_and_donated(fun)
    rest = without_static(static, *_arranged(fun, args, kwargs))
    names, args, kwargs = rest.names, rest.args, rest.kwargs
    for (argument, _), value in zip(names, args, strict=True):
        if isinstance(value, Iterator) and jax.tree_util.default_registry.flatten_one_level(value) is None:
            raise errors.LeafTypeError(argument, value)
    holders = tuple(map(Holder.of, args))
    arguments = tuple(
        _argument(name, position, holder, value, not donated.isdisjoint((name, position)))
        for (name, position), holder, value in zip(names, holders, args, strict=True)
    )
    objects = tuple(found for value, holder in zip(args, holders, strict=True) for found in holder.objects(value))
    if not objects:
        return PureCall(PureStep(rest.fun, arguments, static=rest.static), args, kwargs)
    with nnx.update_context("jax_deepcompile"):  # takes what nnx.cached_partial has for the step it calls
        graphdef, state = split(objects)
    holding = [argument.name for argument in arguments if argument.has_objects]
    together = Argument(f"({', '.join(holding)})" if len(holding) > 1 else holding[0], None, True)
    named = zip(arguments, holders, args, strict=True)
    found = tuple(f"{argument.name}{path}" for argument, holder, value in named for path in holder.paths(value))
    others = [holder.without_objects(value) for value, holder in zip(args, holders, strict=True)]
    pure = purify(rest.fun, name, graphdef, holders, found)
    step = PureStep(pure, (together, *arguments), Structure(graphdef, holders), found, rest.static)
    return PureCall(step, (state, *others), kwargs, objects)


def sharding_on_host(leaf: Any) -> jax.sharding.Sharding | None:
    """Of an array in the host's memory, or the shape of one; None of what is elsewhere."""
    sharding = leaf.sharding if isinstance(leaf, ArrayImpl | jax.ShapeDtypeStruct) else None
    return sharding if sharding is not None and sharding.memory_kind == HOST_KIND else None


def leaf_type(leaf: Any) -> Hashable:
    """What JAX traces ``leaf`` for: shape, dtype, and whether the dtype is weak. Of what it cannot trace, the class."""
    if not isinstance(leaf, ArrayImpl):
        if not is_numeric(leaf):
            return type(leaf)
        leaf = abstract(leaf)
    return leaf.shape, leaf.dtype, leaf.weak_type


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of an array, a number, a tracer or the shape of one; wherever it is, that of one device."""
    aval: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    dtype = aval.dtype if extended else jax.dtypes.canonicalize_dtype(aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype, weak_type=getattr(aval, "weak_type", False))


def function_name(fun: Callable) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    name = getattr(fun, "__qualname__", None) or getattr(fun, "__name__", None) or type(fun).__name__
    return name.rsplit("<locals>.", 1)[-1]


def argument_names(fun: Callable, count: int) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return tuple(f"args[{position}]" for position in range(count))
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(names[position] if position < len(names) else f"args[{position}]" for position in range(count))


def _arranged(fun: Callable, args: tuple, kwargs: dict) -> tuple[Callable, list[tuple[str, int]], tuple, dict]:
    """``fun`` with all it has parameters for as positional arguments.

    Returns:
      The function, name and position of every argument, the arguments, and those that ``fun`` takes under any name.
    """
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return fun, [(name, position) for position, name in enumerate(argument_names(fun, len(args)))], args, kwargs
    if kwargs:
        bound = signature.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    names = [(name, position) for position, name in enumerate(argument_names(fun, len(args)))]
    parameters = enumerate(signature.parameters.values())
    positions = {each.name: position for position, each in parameters if each.kind is not each.VAR_KEYWORD}
    named = [name for name in positions if name in kwargs]
    values = (*args, *(kwargs[name] for name in named))
    others = {name: value for name, value in kwargs.items() if name not in named}
    arranged = _with_names(fun, len(args), named) if named else fun
    return arranged, [*names, *((name, positions[name]) for name in named)], values, others


def _with_names(fun: Callable, positional: int, named: Sequence[str]) -> Callable:
    def called(*args, **kwargs):
        return fun(*args[:positional], **dict(zip(named, args[positional:], strict=True)), **kwargs)

    return called


def _is_key(value: Any) -> bool:
    """A random key, typed or, as ``jax.random.PRNGKey`` makes them, two or four raw words; or several, each a leaf."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(map(_is_one_key, leaves))


def _is_one_key(value: Any) -> bool:
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return False
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.shape == ()
    return is_raw_key(value)


def _argument(name: str, position: int, holder: Holder, value: Any, is_donated: bool) -> Argument:
    nodes = jax.tree.leaves(value, is_leaf=is_optimizer_state)
    optimizers = sum(map(is_optimizer_state, nodes))
    return Argument(
        name,
        position,
        has_objects=holder.count > 0,
        has_arrays=holder.count < len(holder.slots),
        is_key=_is_key(value),
        has_optimizer=optimizers > 0,
        is_optimizer=optimizers == len(nodes) > 0,
        is_number=len(nodes) > 0 and all(map(_is_number, nodes)),
        is_donated=is_donated,
    )


def holds_optimizer(value: Any) -> bool:
    """Whether the state of an optax optimizer is in ``value``."""
    return any(map(is_optimizer_state, jax.tree.leaves(value, is_leaf=is_optimizer_state)))


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, (int, float, complex)):
        return True
    return is_numeric(leaf) and leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)
