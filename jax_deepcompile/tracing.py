"""From the user's step to a global-view ``Program``: abstract tracing, roles, inlining, dead code, checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jax_deepcompile import _jax_compat, errors
from jax_deepcompile.ir.canonicalize import canonicalize
from jax_deepcompile.ir.empty_arrays import without_empty_arrays
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.program import Port, Program, Role
from jax_deepcompile.ir.traversal import equations, inline_calls

_OPTIMIZER_NAMES = frozenset({"opt_state", "optimizer", "opt", "optimizer_state"})
_REFUSED_CALLBACKS = frozenset({"pure_callback", "io_callback"})


@dataclass(frozen=True)
class Signature:
    """Which arguments of a step are what.

    Attributes:
      function: the step's name, for messages.
      state: positions of the state arguments.
      parameters: positions of arguments like these, which are state if the step returns them, and only read otherwise.
      batch: positions of the batch arguments, whose leaves have examples unless they are scalars.
      names: the name of every positional argument.
    """

    function: str
    state: tuple[int, ...]
    parameters: tuple[int, ...]
    batch: tuple[int, ...]
    names: tuple[str, ...]

    def role_of(self, position: int | None) -> Role:
        if position in self.state or position in self.parameters:
            return Role.PARAM
        return Role.BATCH if position in self.batch else Role.OTHER

    def name_of(self, position: int) -> str:
        return self.names[position] if position < len(self.names) else f"args[{position}]"


@dataclass(frozen=True)
class Traced:
    """A step's program and how the user's arguments map to its inputs.

    Attributes:
      program: the global view.
      in_tree: structure of ``(args, kwargs)``.
    """

    program: Program
    in_tree: Any

    @property
    def returned(self) -> tuple[int, ...]:
        """Positions of the arguments that the step returns anew: what it may have the memory of."""
        returned = {source for source, _ in self.program.state_outputs}
        args, _ = jax.tree.unflatten(self.in_tree, range(self.in_tree.num_leaves))
        return tuple(place for place, arg in enumerate(args) if not returned.isdisjoint(jax.tree.leaves(arg)))


def function_name(fun: Callable) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    name = getattr(fun, "__qualname__", None) or getattr(fun, "__name__", None) or type(fun).__name__
    return name.rsplit("<locals>.", 1)[-1]


def abstract_key(args: tuple, kwargs: dict, signature: Signature) -> Hashable:
    """What a traced step depends on: the structure of its arguments and the type of every leaf."""
    ports, tree = _input_ports(args, kwargs, signature)
    weak = tuple(bool(getattr(_aval(leaf), "weak_type", False)) for leaf in jax.tree.leaves((args, kwargs)))
    return tree, tuple((port.shape, port.dtype) for port in ports), weak


def argument_names(fun: Callable, count: int) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return tuple(f"args[{position}]" for position in range(count))
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(names[position] if position < len(names) else f"args[{position}]" for position in range(count))


def trace_step(fun: Callable, args: tuple, kwargs: dict, signature: Signature, mesh: MeshAxes) -> Traced:
    """Traces ``fun(*args, **kwargs)``; leaves may be arrays, numbers, tracers or ``jax.ShapeDtypeStruct``s."""
    ports, in_tree = _input_ports(args, kwargs, signature)
    closed, out_shape = _trace(fun, args, kwargs, ports, signature.function)
    out_leaves, out_tree = jax.tree_util.tree_flatten_with_path(out_shape)
    state_outputs = _match_state(args, out_shape, signature)
    by_output = {out: ports[inp] for inp, out in (*_alike(args, out_shape, signature), *state_outputs)}
    outputs = tuple(
        by_output.get(index, _port(f"out{jax.tree_util.keystr(path)}", Role.OTHER, leaf))
        for index, (path, leaf) in enumerate(out_leaves)
    )
    program = Program(signature.function, closed, ports, outputs, out_tree, state_outputs, mesh)
    return Traced(program, in_tree)


def trace_init(fun: Callable, args: tuple, kwargs: dict, mesh: MeshAxes) -> Traced:
    """Traces the function that creates the state: inputs are replicated, every output is state."""
    name = function_name(fun)
    ports, in_tree = _input_ports(args, kwargs, Signature(name, (), (), (), argument_names(fun, len(args))))
    closed, out_shape = _trace(fun, args, kwargs, ports, name)
    leaves, out_tree = jax.tree_util.tree_flatten_with_path(out_shape)
    outputs = tuple(_port(f"state{jax.tree_util.keystr(path)}", _state_role(path), leaf) for path, leaf in leaves)
    return Traced(Program(name, closed, ports, outputs, out_tree, (), mesh), in_tree)


def _trace(fun: Callable, args: tuple, kwargs: dict, ports: Sequence[Port], name: str) -> tuple[jex.ClosedJaxpr, Any]:
    shapes = jax.tree.map(_without_mesh, (args, kwargs))
    try:
        closed, out_shape = jax.make_jaxpr(functools.partial(_call, fun, name), return_shape=True)(*shapes)
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise errors.AxisNameError(name, str(error).split("\n")[0]) from error
    except (TypeError, ValueError) as error:
        if "Non-hashable static arguments" in str(error):
            raise errors.StaticArgumentError(name, str(error).split("\n")[0]) from error
        if not isinstance(error, TypeError):
            raise
        needed = _python_values(args, kwargs, ports, str(error))
        if not needed:
            raise
        raise errors.PythonValueNeededError(name, needed, str(error).split("\n")[0]) from error
    flat = canonicalize(without_empty_arrays(inline_calls(closed)))
    _refuse_effects(flat)
    live = _jax_compat.dce(_jax_compat.open_jaxpr(flat))
    return jex.ClosedJaxpr(live, _jax_compat.closed_consts(flat)), out_shape


def _python_values(args: tuple, kwargs: dict, ports: Sequence[Port], message: str) -> list[str]:
    """Where the user finds the numbers that JAX says it needs the values of; none if it needs those of arrays too."""
    _, _, causes = message.partition("depends on the value")
    needed = []
    for (path, leaf), port in zip(jax.tree_util.tree_leaves_with_path((args, kwargs)), ports, strict=True):
        name = f"{'kwargs' if path[0].idx else 'args'}{jax.tree_util.keystr(path[1:])}"
        if isinstance(leaf, (bool, int, float)) and not port.role.is_state and name in causes:
            causes = causes.replace(name, "")
            needed.append(port.path)
    return [] if "args[" in causes else needed


def _without_mesh(leaf: Any) -> Any:
    """The step is traced as if for one device, wherever its arguments are."""
    aval = _aval(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _aval(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def _call(fun: Callable, name: str, args: tuple, kwargs: dict):
    out = fun(*args, **kwargs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if isinstance(leaf, (str, bytes)) or callable(leaf):
            raise errors.ReturnedLeafError(name, f"out{jax.tree_util.keystr(path)}", leaf)
    return out


def _refuse_effects(closed: jex.ClosedJaxpr) -> None:
    for eqn in equations(closed):
        name = eqn.primitive.name
        if name in _REFUSED_CALLBACKS:
            raise errors.HostCallbackError(name, _jax_compat.user_line(eqn))
        if eqn.params.get("ordered") and name.startswith("debug_"):
            raise errors.OrderedEffectError(name, _jax_compat.user_line(eqn))


def _input_ports(args: tuple, kwargs: dict, signature: Signature) -> tuple[tuple[Port, ...], Any]:
    leaves, in_tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    ports = []
    for path, leaf in leaves:
        position = path[1].idx if path[0].idx == 0 else None
        where = signature.name_of(position) if position is not None else path[1].key
        rest = path[2:]
        name = f"{where}{jax.tree_util.keystr(rest)}"
        role = signature.role_of(position)
        port = _port(name, _state_role(rest, where) if role is Role.PARAM else role, leaf)
        ports.append(replace(port, role=Role.OTHER) if role is Role.BATCH and not port.shape else port)
    return tuple(ports), in_tree


def _port(path: str, role: Role, leaf: Any) -> Port:
    try:
        shape = tuple(np.shape(leaf)) if not hasattr(leaf, "shape") else tuple(leaf.shape)
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    except (TypeError, ValueError) as error:
        raise errors.LeafTypeError(path, leaf) from error
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)) and not (
        jnp.issubdtype(dtype, jax.dtypes.extended)
    ):
        raise errors.LeafTypeError(path, leaf)
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return Port(path, role, shape, str(dtype if extended else jax.dtypes.canonicalize_dtype(dtype)))


def _state_role(path: Sequence, argument: str = "") -> Role:
    names = {argument, *(str(getattr(key, "name", getattr(key, "key", ""))) for key in path)}
    return Role.OPTIMIZER if names & _OPTIMIZER_NAMES else Role.PARAM


def _match_state(args: tuple, out_shape: Any, signature: Signature) -> tuple[tuple[int, int], ...]:
    """Pairs (flat input, flat output) of the state arguments and what the step returns in their place.

    Those with the most leaves come first: an optimizer's moments look like parameters.
    """
    found: dict[int, _Subtree] = {}
    subtrees = sorted(_subtrees(out_shape), key=lambda sub: sub.depth)

    def free(position: int) -> list[_Subtree]:
        taken = {leaf for sub in found.values() for leaf in sub.leaves}
        wanted = jax.tree.structure(args[position])
        return [sub for sub in subtrees if sub.structure == wanted and taken.isdisjoint(sub.leaves)]

    def most_leaves_first(positions: Sequence[int]) -> list[int]:
        return sorted(positions, key=lambda position: -jax.tree.structure(args[position]).num_leaves)

    for position in most_leaves_first(signature.state):
        candidates = free(position)
        same = [sub for sub in candidates if not _changes(args[position], sub.tree, "")]
        if not candidates:
            _explain_missing(args[position], subtrees, signature, position, out_shape)
        if not same:
            changes = _changes(args[position], candidates[0].tree, signature.name_of(position))
            raise errors.StateChangedError(signature.function, changes)
        found[position] = same[0]
    for position in most_leaves_first(signature.parameters):
        same = [sub for sub in free(position) if not _changes(args[position], sub.tree, "")]
        if same and len(same) >= len(_rivals(args, position, set(signature.parameters) - set(found))):
            found[position] = same[0]
    return tuple(
        (len(jax.tree.leaves(args[:position])) + index, leaf)
        for position in sorted(found)
        for index, leaf in enumerate(found[position].leaves)
    )


def _rivals(args: tuple, position: int, others: Collection[int]) -> list[int]:
    """Those of ``others`` that could be what a step returns in place of argument ``position`` as well."""
    structure = jax.tree.structure(args[position])
    alike = [other for other in others if jax.tree.structure(args[other]) == structure]
    return [other for other in alike if not _changes(args[position], args[other], "")]


def _alike(args: tuple, out_shape: Any, signature: Signature) -> list[tuple[int, int]]:
    """Pairs like those of ``_match_state`` of everything returned that looks like state, gradients say."""
    pairs = []
    for position in (*signature.state, *signature.parameters):
        structure = jax.tree.structure(args[position])
        start = len(jax.tree.leaves(args[:position]))
        for sub in _subtrees(out_shape):
            if sub.structure == structure and structure.num_leaves > 1 and not _changes(args[position], sub.tree, ""):
                pairs += zip(range(start, start + structure.num_leaves), sub.leaves, strict=True)
    return pairs


@dataclass(frozen=True)
class _Subtree:
    """A part of what a step returns.

    Attributes:
      tree: the part.
      structure: of it.
      leaves: positions of its leaves among all that are returned.
      depth: how deep inside it is.
    """

    tree: Any
    structure: Any
    leaves: range
    depth: int


def _subtrees(tree: Any, start: int = 0, depth: int = 0):
    """The returned tree and all trees it is made of."""
    structure = jax.tree.structure(tree)
    yield _Subtree(tree, structure, range(start, start + structure.num_leaves), depth)
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    for child in level[0] if level is not None else ():
        yield from _subtrees(child, start, depth + 1)
        start += len(jax.tree.leaves(child))


def _changes(before: Any, after: Any, where: str) -> list[str]:
    old = jax.tree_util.tree_flatten_with_path(before)[0]
    new = jax.tree.leaves(after)
    found = []
    for (path, leaf), other in zip(old, new, strict=True):
        was, now = _kind(leaf), _kind(other)
        if was != now:
            found.append(f"{where}{jax.tree_util.keystr(path)} was {was} and is {now}")
    return found


def _kind(leaf: Any) -> str:
    port = _port("", Role.OTHER, leaf)
    return f"{port.dtype}[{','.join(map(str, port.shape))}]"


def _explain_missing(state: Any, subtrees, signature: Signature, position: int, out_shape: Any) -> None:
    """Says which of the two it was: state returned in a changed structure, or no state returned at all."""
    name = signature.name_of(position)
    for sub in subtrees:
        if _resembles(sub.tree, state):
            raise errors.StateChangedError(signature.function, _structure_changes(state, sub.tree, name))
    returned = jax.tree.map(_kind, out_shape)
    text = str(returned)
    raise errors.StateNotReturnedError(signature.function, name, text if len(text) < 200 else text[:197] + "...")


def _resembles(returned: Any, state: Any) -> bool:
    """Whether ``returned`` is meant to be the state: of the same type, and for dicts with keys in common."""
    if type(returned) is not type(state) or isinstance(state, (tuple, list)) or hasattr(state, "dtype"):
        return False
    return not isinstance(state, dict) or bool(set(state) & set(returned))


def _structure_changes(before: Any, after: Any, name: str) -> list[str]:
    old = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(before)[0]}
    new = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(after)[0]}
    found = [f"{name}{path} is missing" for path in sorted(old - new)]
    found += [f"{name}{path} is new" for path in sorted(new - old)]
    return found or [f"the static fields of {name} ({type(before).__name__}) differ"]
