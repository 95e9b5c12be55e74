"""What a device holds of a step's arguments, and of the state what may be on the host between steps."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.ir.program import Program, Role
from jax_deepcompile.lowering.compile import memory_options
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.offload_state import OffloadedState, movable

COPIED_BYTES = 1 << 20
"""What is less is not worth a copy."""


def argument_bytes(program: Program) -> int:
    """What one device holds of the arguments of ``program``; XLA is not given those that nothing reads."""
    jaxpr = open_jaxpr(program.jaxpr)
    read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, jex.Var)}
    return sum(size_bytes(var) for var in jaxpr.invars if var in read)


def state_bytes(program: Program) -> dict[str, int]:
    """What one device holds of each leaf of an optimizer's state that may be on the host."""
    variables, ports = open_jaxpr(program.jaxpr).invars, program.inputs
    leaves = {name: place for place, name in movable(program).items() if ports[place].role is Role.OPTIMIZER}
    sizes = {name: size_bytes(variables[place]) for name, place in leaves.items()}
    return {name: size for name, size in sizes.items() if size >= COPIED_BYTES}


def with_state_on_host(
    plan: Plan, base: Program, away: Sequence[str], environment: Environment, by_layer: bool
) -> Plan:
    """``plan`` where the leaves that are ``away``, and no others, are on the host, and XLA knows what that leaves.

    Args:
      by_layer: whether stacks are updated a layer at a time.
    """
    if not away or environment.limit_bytes is None:
        return plan.without(OffloadedState)
    state = state_bytes(base)
    held_bytes = argument_bytes(base) - sum(state[name] for name in away)
    options = memory_options(environment.limit_bytes, held_bytes, environment.costs.hardware.memory_bytes)
    plan = plan.having(OffloadedState, [OffloadedState(tuple(away), by_layer)])
    return plan.replace(options=dict(plan.options) | options)
