"""From the user's step to a global-view ``Program``: abstract tracing, inlining, dead code, checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jax_deepcompile import _jax_compat, errors
from jax_deepcompile.frontend.canonicalize.empty_arrays import without_empty_arrays
from jax_deepcompile.frontend.canonicalize.explicit import canonicalize
from jax_deepcompile.frontend.signature import Signature, input_ports, port_of, state_role
from jax_deepcompile.frontend.state_matching import Returned, outputs_like_state, state_outputs
from jax_deepcompile.ir.lineage import carried_inputs
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.program import Port, Program, Role
from jax_deepcompile.ir.traversal import equations, inline_calls

_REFUSED_CALLBACKS = frozenset({"pure_callback", "io_callback"})


@dataclass(frozen=True)
class Function:
    """A step as a function of flat arrays.

    Attributes:
      closed: it, with nothing in it that does not count.
      returned: what it returns.
    """

    closed: jex.ClosedJaxpr
    returned: Returned


@dataclass(frozen=True)
class Traced:
    """A step's program and how the user's arguments map to its inputs.

    Attributes:
      program: the global view.
      in_tree: structure of ``(args, kwargs)``.
      taken: positions of the arguments whose memory the step may have: state that it surely returns anew. Where no
        optimizer is there, what looks like new parameters may be gradients that carry on a penalty's parameters.
    """

    program: Program
    in_tree: Any
    taken: tuple[int, ...] = ()

    @property
    def taken_leaves(self) -> frozenset[int]:
        """Positions of all leaves in the arguments that are ``taken``."""
        sizes = [tree.num_leaves for tree in self.in_tree.children()[0].children()]
        return frozenset(sum(sizes[:place]) + leaf for place in self.taken for leaf in range(sizes[place]))


def function_name(fun: Callable) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    name = getattr(fun, "__qualname__", None) or getattr(fun, "__name__", None) or type(fun).__name__
    return name.rsplit("<locals>.", 1)[-1]


def abstract_key(args: tuple, kwargs: dict, signature: Signature) -> Hashable:
    """What a traced step depends on: the structure of its arguments and the type of every leaf."""
    ports, tree = input_ports(args, kwargs, signature)
    weak = tuple(bool(getattr(_aval(leaf), "weak_type", False)) for leaf in jax.tree.leaves((args, kwargs)))
    return tree, tuple((port.shape, port.dtype) for port in ports), weak


def argument_names(fun: Callable, count: int) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return tuple(f"args[{position}]" for position in range(count))
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(names[position] if position < len(names) else f"args[{position}]" for position in range(count))


def trace_function(fun: Callable, args: tuple, kwargs: dict, signature: Signature) -> Function:
    """Traces ``fun(*args, **kwargs)``; leaves may be arrays, numbers, tracers or ``jax.ShapeDtypeStruct``s.

    Args:
      fun: the step.
      args, kwargs: its arguments.
      signature: what is known of them, for messages.
    """
    ports, _ = input_ports(args, kwargs, signature)
    closed, out_shape = _trace(fun, args, kwargs, ports, signature.function)
    return Function(closed, Returned(out_shape, carried_inputs(closed)))


def trace_step(function: Function, args: tuple, kwargs: dict, signature: Signature, mesh: MeshAxes) -> Traced:
    """The program of a step whose ``(*args, **kwargs)`` are what ``signature`` says."""
    ports, in_tree = input_ports(args, kwargs, signature)
    out_leaves, out_tree = jax.tree_util.tree_flatten_with_path(function.returned.shape)
    pairs = state_outputs(args, function.returned, signature)
    like_state = outputs_like_state(args, function.returned, signature)
    by_output = {out: ports[inp] for inp, out in (*like_state, *pairs)}
    outputs = tuple(
        by_output.get(index, port_of(f"out{jax.tree_util.keystr(path)}", Role.OTHER, leaf))
        for index, (path, leaf) in enumerate(out_leaves)
    )
    program = Program(signature.function, function.closed, ports, outputs, out_tree, pairs, mesh)
    return Traced(program, in_tree, _taken(args, {source for source, _ in pairs}, signature))


def _taken(args: tuple, sources: Collection[int], signature: Signature) -> tuple[int, ...]:
    taken, start = [], 0
    for position, arg in enumerate(args):
        kinds = [port_of("", Role.OTHER, leaf).dtype for leaf in jax.tree.leaves(arg)]
        is_sure = signature.trains or not all(
            jnp.issubdtype(kind, jnp.floating) for kind in kinds if "key<" not in kind
        )
        if kinds and start in sources and is_sure:
            taken.append(position)
        start += len(kinds)
    return tuple(taken)


def trace_init(fun: Callable, args: tuple, kwargs: dict, mesh: MeshAxes) -> Traced:
    """Traces the function that creates the state: inputs are replicated, every output is state."""
    name = function_name(fun)
    ports, in_tree = input_ports(args, kwargs, Signature(name, names=argument_names(fun, len(args))))
    closed, out_shape = _trace(fun, args, kwargs, ports, name)
    leaves, out_tree = jax.tree_util.tree_flatten_with_path(out_shape)
    outputs = tuple(port_of(f"state{jax.tree_util.keystr(path)}", state_role(path), leaf) for path, leaf in leaves)
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
        if "passed to shard_map" in str(error) and "does not match the specs of the input" in str(error):
            raise errors.ExplicitAxesError(name, str(error).split(". ")[0]) from error
        if not isinstance(error, TypeError):
            raise
        needed = _python_values(args, kwargs, ports, str(error))
        if not needed:
            raise
        in_state = [port.path for port in needed if port.role.is_state]
        reason = str(error).split("\n")[0]
        if in_state:
            raise errors.StateValueNeededError(name, in_state, reason) from error
        raise errors.PythonValueNeededError(name, [port.path for port in needed], reason) from error
    flat = canonicalize(without_empty_arrays(inline_calls(closed)))
    _refuse_effects(flat)
    live = _jax_compat.dce(_jax_compat.open_jaxpr(flat))
    return jex.ClosedJaxpr(live, _jax_compat.closed_consts(flat)), out_shape


def _python_values(args: tuple, kwargs: dict, ports: Sequence[Port], message: str) -> list[Port]:
    """The numbers of Python's that JAX says it needs the values of; none if it needs those of arrays too."""
    _, _, causes = message.partition("depends on the value")
    needed = []
    for (path, leaf), port in zip(jax.tree_util.tree_leaves_with_path((args, kwargs)), ports, strict=True):
        name = f"{'kwargs' if path[0].idx else 'args'}{jax.tree_util.keystr(path[1:])}"
        if isinstance(leaf, (bool, int, float, np.generic)) and name in causes:
            causes = causes.replace(name, "")
            needed.append(port)
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
