"""From the user's step to a global-view ``Program``: abstract tracing, inlining, dead code, checks."""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jax_deepcompile import _jax_compat, errors
from jax_deepcompile.frontend.axes import axes_around, trace_alone
from jax_deepcompile.frontend.call import PureCall, abstract, argument_names, function_name, sharding_on_host
from jax_deepcompile.frontend.containers import closed, opened
from jax_deepcompile.frontend.donation import Kept, donations
from jax_deepcompile.frontend.signature import (
    Signature,
    input_ports,
    is_numeric,
    optimizer_leaves,
    port_of,
    state_role,
)
from jax_deepcompile.frontend.state_matching import Returned, outputs_like_state, state_outputs
from jax_deepcompile.ir.lineage import lineage
from jax_deepcompile.ir.memory import HOST_KIND, size_bytes
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.program import Port, Program, Role
from jax_deepcompile.ir.traversal import equations, inline_calls, nested_jaxprs

_HANDED_OVER_AT_ONCE_BYTES = 100 * 1024
"""XLA's CPU client copies more than that in threads of its own, which devices that wait for a callback may hold all of.

What one callback returns may be more for the next: those are the messages of an error that the first has raised.
"""


@dataclass(frozen=True)
class Function:
    """A step as a function of flat arrays, with nothing in it that does not count, and what it returns.

    Attributes:
      out_tree: the structure of what it returns.
      alone: axes that it names and nothing maps it over.
    """

    closed: jex.ClosedJaxpr
    returned: Returned
    out_tree: Any
    alone: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traced:
    """A step's program and how the user's arguments map to its inputs.

    Attributes:
      program: the global view.
      in_tree: structure of ``(args, kwargs)``.
      donated: positions of the arguments whose memory the step may have.
      handed_on: positions of leaves such as random keys, whose next values the step returns beside the state; and of
        those in NNX objects that it does not change, which have them from then on where the step wants them.
      alike: positions of other leaves that the step returns one like, such as hidden states, which may be handed back.
      reasons: by the name of every argument why it is what it is, and donated or not.
      alone: axes that the step names and nothing maps it over.
    """

    program: Program
    in_tree: Any
    donated: tuple[int, ...] = ()
    handed_on: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    alone: tuple[str, ...] = ()

    @functools.cached_property
    def returned_leaves(self) -> frozenset[int]:
        """Positions of all leaves that the step returns anew."""
        return self.handed_on.union(source for source, _ in self.program.state_outputs)

    @functools.cached_property
    def donated_leaves(self) -> frozenset[int]:
        """Positions of all leaves in the arguments that are donated."""
        sizes = [tree.num_leaves for tree in self.in_tree.children()[0].children()]
        return frozenset(sum(sizes[:index]) + leaf for index in self.donated for leaf in range(sizes[index]))


def trace_function(call: PureCall, signature: Signature) -> Function:
    """Traces a call; leaves may be arrays, numbers, tracers or ``jax.ShapeDtypeStruct``s."""
    ports, _ = input_ports(call.args, call.kwargs, signature)
    written, out_shape, out_tree, alone = _trace(call.step.fun, call.args, call.kwargs, ports, signature.function)
    jaxpr = _live(written)
    return Function(jaxpr, Returned(out_shape, lineage(jaxpr), written), out_tree, alone)


def trace_step(function: Function, call: PureCall, signature: Signature, mesh: MeshAxes, donate: bool = True) -> Traced:
    """The program of a step, traced for a call whose arguments are what ``signature`` says."""
    returned = function.returned
    ports, in_tree = input_ports(call.args, call.kwargs, signature)
    out_leaves = jax.tree_util.tree_leaves_with_path(returned.shape)
    pairs = state_outputs(call.args, returned, signature)
    by_hand = Kept.of(ports, dict(pairs), returned.lineage)
    ports = tuple(
        replace(port, role=Role.OPTIMIZER) if leaf in by_hand.moments else port for leaf, port in enumerate(ports)
    )
    like_state = outputs_like_state(call.args, returned, signature, parts=not pairs)
    by_output = {out: ports[inp] for inp, out in (*like_state, *pairs)}
    outputs = tuple(
        by_output.get(index, port_of(f"out{jax.tree_util.keystr(path)}", Role.OTHER, leaf))
        for index, (path, leaf) in enumerate(out_leaves)
    )
    program = Program(signature.function, function.closed, ports, outputs, function.out_tree, pairs, mesh)
    program = _with_unread_state(program, jax.tree.leaves((call.args, call.kwargs)))
    reasons, donated = dict(reversed(signature.reasons)), []
    for position, donation in donations(call, signature, ports, dict(pairs), returned.lineage, by_hand).items():
        reason, arguments = donation.reason if donate else "donate=False", call.step.arguments
        holding = [each.name for each in arguments if each.has_objects and each.position is not None]
        for name in holding if arguments[position].position is None else [arguments[position].name]:
            reasons[name] = f"{reasons[name]}; {reason}" if name in reasons else reason
        donated += [position] * (donation.is_donated and donate)
    for axis in function.alone:
        text = "%s names the axis %r, which nothing maps it over: it is alone along it, and sees the whole batch"
        logging.getLogger("jax_deepcompile").warning(text, signature.function, axis)
    kept = range(len(jax.tree.leaves(call.args[0]))) if signature.objects and returned.shape[0] is None else ()
    handed_on = _handed_on(program).union(kept)
    return Traced(program, in_tree, tuple(donated), handed_on, _alike(program, handed_on), reasons, function.alone)


def _with_unread_state(program: Program, leaves: Sequence) -> Program:
    """``program`` whose state that nothing reads is said to be on the host where those ``leaves`` of the call are."""
    away = {place for place in program.unread_state if sharding_on_host(leaves[place])}
    inputs = enumerate(program.inputs)
    there = tuple(replace(port, memory_kind=HOST_KIND) if place in away else port for place, port in inputs)
    return program.replace(inputs=there) if away else program


def _handed_on(program: Program) -> frozenset[int]:
    """Positions of keys and whole numbers that are not state, but that the step returns one like."""
    returned = set(map(_kind, program.outputs))
    others = ((index, port) for index, port in enumerate(program.inputs) if port.role is Role.OTHER)
    whole = ("key<", "uint", "int")
    return frozenset(index for index, port in others if port.dtype.startswith(whole) and _kind(port) in returned)


def _alike(program: Program, handed_on: frozenset[int]) -> frozenset[int]:
    """Positions of arrays that the step returns one like, but for those that it is known to return anew."""
    known = dict(program.state_outputs)
    others = [port for at, port in enumerate(program.outputs) if port.shape and at not in known.values()]
    made = {(port.shape, port.dtype) for port in others}
    inputs = enumerate(program.inputs)
    return frozenset(at for at, port in inputs if (port.shape, port.dtype) in made) - known.keys() - handed_on


def _kind(port: Port) -> tuple:
    return port.role, port.shape, port.dtype


def trace_init(fun: Callable, args: tuple, kwargs: dict, mesh: MeshAxes) -> Traced:
    """Traces the function that creates the state: inputs are replicated, every output is state."""
    name = function_name(fun)
    ports, in_tree = input_ports(args, kwargs, Signature(name, names=argument_names(fun, len(args))))
    jaxpr, out_shape, out_tree, _ = _trace(fun, args, kwargs, ports, name)
    leaves = jax.tree_util.tree_leaves_with_path(out_shape)
    outputs = tuple(
        port_of(f"state{jax.tree_util.keystr(path)}", state_role(path, is_optimizers=is_optimizers), leaf)
        for (path, leaf), is_optimizers in zip(leaves, optimizer_leaves(out_shape), strict=True)
    )
    return Traced(Program(name, _live(jaxpr), ports, outputs, out_tree, (), mesh), in_tree)


def _trace(
    fun: Callable, args: tuple, kwargs: dict, ports: Sequence[Port], name: str
) -> tuple[jex.ClosedJaxpr, Any, Any, tuple[str, ...]]:
    """The jaxpr of ``fun``, whose calls are inlined, with what it computes in vain; the shapes of what it returns,
    ``opened``, its structure, and axes it is alone along."""
    shapes, trees = jax.tree.map(abstract, opened((args, kwargs))), list[Any]()
    try:
        jaxpr, out_shape, alone = trace_alone(functools.partial(_call, fun, name, trees), shapes)
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise errors.AxisNameError(name, str(error).split("\n")[0]) from error
    except (TypeError, ValueError) as error:
        if "Non-hashable static arguments" in str(error):
            raise errors.TracedStaticArgumentError(name, str(error).split("\n")[0]) from error
        if "passed to shard_map" in str(error) and "does not match the specs of the input" in str(error):
            raise errors.ExplicitAxesError(name, str(error).split(". ")[0]) from error
        own = _own_names(args, kwargs)
        needed, reason = _python_values(args, kwargs, ports, own, str(error)), str(error).split("\n")[0]
        if not needed:
            if f"the function {_call.__name__} at " in str(error):
                error.args = (_as_users(str(error), name, dict(zip(own, ports, strict=True))),)
            raise
        if in_state := [port.path for port in needed if port.role.is_state]:
            raise errors.StateValueNeededError(name, in_state, reason) from error
        raise errors.PythonValueNeededError(name, [port.path for port in needed], reason) from error
    flat = inline_calls(_without_mutables(jaxpr, name))
    if around := axes_around(flat):
        raise errors.AxisNameError(name, f"{min(around)} is an axis of what maps the sharded step")
    _refuse_effects(flat)
    return flat, out_shape, trees[-1], alone


def _live(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """What ``jaxpr`` needs for its results."""
    return jex.ClosedJaxpr(_jax_compat.dce(_jax_compat.open_jaxpr(jaxpr)), _jax_compat.closed_consts(jaxpr))


def _own_names(args: tuple, kwargs: dict) -> list[str]:
    """What JAX calls every leaf, by the parameters of ``_call``."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs)))
    return [f"{'kwargs' if path[0].idx else 'args'}{jax.tree_util.keystr(path[1:])}" for path in paths]


def _as_users(message: str, function: str, ports: Mapping[str, Port]) -> str:
    """JAX's ``message`` about ``_call`` with the names of the user's function and arguments."""
    message = re.sub(
        rf"the function {_call.__name__} at .+?:\d+( for \w+)?", lambda _: f"the function {function}", message
    )
    names = "|".join(map(re.escape, sorted(ports, key=len, reverse=True)))
    return re.sub(names, lambda found: ports[found[0]].path, message) if names else message


def _python_values(args: tuple, kwargs: dict, ports: Sequence[Port], names: Sequence[str], message: str) -> list[Port]:
    """The numbers of Python's that JAX says it needs the values of; none if it needs those of arrays too."""
    _, _, causes = message.partition("depends on the value")
    needed = []
    for leaf, name, port in zip(jax.tree.leaves((args, kwargs)), names, ports, strict=True):
        if isinstance(leaf, (bool, int, float, np.generic)) and name in causes:
            causes = causes.replace(name, "")
            needed.append(port)
    return [] if "args[" in causes else needed


def _call(fun: Callable, name: str, trees: list[Any], args: tuple, kwargs: dict):
    """What ``fun`` returns, ``opened``; its structure is added to ``trees``."""
    out = fun(*closed(args), **closed(kwargs))
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if callable(leaf) or not (hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__") or is_numeric(leaf)):
            raise errors.ReturnedLeafError(name, f"out{jax.tree_util.keystr(path)}", leaf)
    trees.append(jax.tree.structure(out))
    return opened(out)


def _without_mutables(closed: jex.ClosedJaxpr, function: str) -> jex.ClosedJaxpr:
    """``closed`` with values in place of the mutable arrays that it makes; those that it closes over outlive it."""
    using = list(_using_mutable(closed))
    if not using:
        return closed
    if not any(map(_jax_compat.is_mutable, _jax_compat.open_jaxpr(closed).constvars)):
        with contextlib.suppress(NotImplementedError):
            return _jax_compat.without_mutables(closed)
    where = _jax_compat.user_line(using[-1])
    raise errors.MutableArrayError(f"{function} uses a mutable array (jax.new_ref) at {where}")


def _using_mutable(jaxpr: Any) -> Iterator[jex.JaxprEqn]:
    """Not what kernels do with the memory that they are given, whose equation is given none.

    Of what reads, writes or makes one, the innermost comes last.
    """
    for eqn in _jax_compat.open_jaxpr(jaxpr).eqns:
        is_given = any(map(_jax_compat.is_mutable, (*eqn.invars, *eqn.outvars)))
        if is_given:
            yield eqn
        for inner in nested_jaxprs(eqn):
            if is_given or not any(map(_jax_compat.is_mutable, _jax_compat.open_jaxpr(inner).invars)):
                yield from _using_mutable(inner)


def _refuse_effects(closed: jex.ClosedJaxpr) -> None:
    returned: set = set()  # by functions on the host
    for eqn in equations(closed):
        name = eqn.primitive.name
        if name == "io_callback":
            raise errors.HostCallbackError(name, _jax_compat.user_line(eqn))
        if name == "pure_callback":
            large = [
                atom for atom in eqn.invars if size_bytes(atom) > _HANDED_OVER_AT_ONCE_BYTES and atom not in returned
            ]
            if large:
                raise errors.HostCallbackError(name, _jax_compat.user_line(eqn), large[0].aval.str_short())
            returned.update(eqn.outvars)
        if eqn.params.get("ordered") and name.startswith("debug_"):
            raise errors.OrderedEffectError(name, _jax_compat.user_line(eqn))
