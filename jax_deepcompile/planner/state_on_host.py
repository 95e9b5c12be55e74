"""What a device holds of a step's arguments, and of the state what may be on the host between steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.names import parameter_names
from jax_deepcompile.ir.memory import HOST_KIND, size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Port, Program, Role
from jax_deepcompile.lowering.compile import memory_options
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.stacks import by_layer
from jax_deepcompile.transforms.accumulate_in_loops import AccumulateInLoops
from jax_deepcompile.transforms.decision import loop_named
from jax_deepcompile.transforms.offload_parameters import OffloadedParameters, reads
from jax_deepcompile.transforms.offload_state import OffloadedState, movable
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from jax_deepcompile.transforms.update_in_loops import LoopUpdate, UpdatedInLoop, in_turn

COPIED_BYTES = 1 << 20
"""What is less is not worth a copy."""


LAYERS_IN_FLIGHT = 3
"""Layers whose values the device holds of what is on the host."""


@dataclass(frozen=True)
class HostLeaf:
    """A leaf of the state that may be on the host between steps.

    Attributes:
      size_bytes: of one device's shard.
      reads: how often a step reads it there, all layers each time, before it is updated.
      layer_bytes: of a layer; 0 for what is not read by layer.
      in_loop: whether it is updated in a backward loop, beside which it is copied.
    """

    size_bytes: int
    reads: int = 0
    layer_bytes: int = 0
    in_loop: bool = False

    @property
    def freed_bytes(self) -> int:
        """What the device has more memory without it."""
        return self.size_bytes - LAYERS_IN_FLIGHT * self.layer_bytes


def argument_bytes(program: Program) -> int:
    """What one device holds of the arguments of ``program``; of those that nothing reads XLA is given state alone."""
    jaxpr = open_jaxpr(program.jaxpr)
    read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, jex.Var)}
    return sum(size_bytes(var) for var in jaxpr.invars if var in read) + unread_bytes(program)


def unread_bytes(program: Program) -> int:
    """What one device holds of the state of ``program`` that it reads nothing of."""
    places = (place for place in program.unread_state if program.inputs[place].memory_kind != HOST_KIND)
    return sum(size_bytes(open_jaxpr(program.jaxpr).invars[place]) for place in places)


def host_leaves(
    program: Program, disabled: Collection[str] = (), updates: Sequence[LoopUpdate] = ()
) -> dict[str, HostLeaf]:
    """The leaves by name: of an optimizer's state, and stacks of parameters that layer loops read.

    Args:
      disabled: kinds of decisions that are left out.
      updates: of state in loops; parameters that they update stay on the device.
    """
    variables, ports = open_jaxpr(program.jaxpr).invars, program.inputs
    streamed = {} if OffloadedParameters.kind in disabled else reads(program)
    in_loops = {name: each.loop.length for each in updates for name in each.copyable.values()}
    updated = {name for each in updates for name in each.names.values()}
    leaves: dict[str, HostLeaf] = {}
    for place, name in movable(program).items():
        var, role = variables[place], ports[place].role
        size = size_bytes(var)
        if size < COPIED_BYTES or OffloadedState.kind in disabled:
            continue
        if role is Role.OPTIMIZER:
            layers = in_loops.get(name, 0)
            leaves[name] = HostLeaf(size, layer_bytes=size // layers if layers else 0, in_loop=bool(layers))
        elif name in streamed and name not in updated:
            leaves[name] = HostLeaf(size, streamed[name], size // var.aval.shape[0])
    return leaves


def loop_updates(base: Program, plan: Plan, mesh: AnyMesh) -> list[LoopUpdate]:
    """What ``plan`` updates in loops."""
    if not plan.of(UpdatedInLoop):
        return []
    program = plan.program(base, mesh, until=AccumulateInLoops)
    return [update for update, _ in in_turn(program, mesh, plan.of(UpdatedInLoop))]


def updatable(program: Program, mesh: AnyMesh, twice: bool = False) -> list[UpdatedInLoop]:
    """In which loops state can be updated: each leaf in the last that makes gradients of it.

    Args:
      twice: where a scalar of all gradients is read, so that the loop has to run once before.
    """
    found = []
    names = [loop.name for loop in sorted(find_loops(program), key=lambda loop: loop.path, reverse=True)]
    for name in names:
        if LoopUpdate.of(program, loop_named(program, name, "updates state in"), twice):
            found.append(UpdatedInLoop(name, twice=twice))
            ((_, program),) = in_turn(program, mesh, found[-1:])
    return found


def born(program: Program, plan: Plan) -> Sequence[Port]:
    """What ``program`` makes, which creates the state, in the memory where ``plan`` has what goes by the same name."""
    away = {name for each in plan.of(OffloadedState) for name in each.leaves}
    names = parameter_names(program.replace(inputs=program.outputs))
    there = zip(program.outputs, names, strict=True)
    return [replace(port, memory_kind=HOST_KIND) if name in away else port for port, name in there]


def with_state_on_host(
    plan: Plan, base: Program, away: Sequence[str], environment: Environment, updated_by_layer: bool
) -> Plan:
    """``plan`` where the leaves that are ``away``, and no others, are on the host, and XLA knows what that leaves.

    Args:
      updated_by_layer: whether stacks are updated a layer at a time.
    """
    updates = loop_updates(base, plan, environment.mesh)
    copyable = {each.loop.name: each.copyable.values() for each in updates}
    copied = {loop: tuple(name for name in away if name in names) for loop, names in copyable.items()}
    plan = plan.having(UpdatedInLoop, [replace(each, copied=copied[each.loop]) for each in plan.of(UpdatedInLoop)])
    if not away or environment.limit_bytes is None:
        return plan.without(OffloadedState, OffloadedParameters)
    leaves = host_leaves(base, updates=updates)
    held_bytes = argument_bytes(base) - sum(leaves[name].size_bytes for name in away)
    options = memory_options(environment.limit_bytes, held_bytes, environment.costs.hardware.memory_bytes)
    streamed = tuple(name for name in away if leaves[name].reads)
    plan = plan.having(StackCollectives, by_layer(plan.of(StackCollectives), streamed))
    plan = plan.having(OffloadedParameters, [OffloadedParameters(streamed)] if streamed else [])
    plan = plan.having(OffloadedState, [OffloadedState(tuple(away), updated_by_layer)])
    return plan.replace(options=dict(plan.options) | options)
