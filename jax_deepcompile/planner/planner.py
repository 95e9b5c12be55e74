"""From a fully sharded program to the best plan that fits."""

from __future__ import annotations

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import Options, kernels_once, memory_options
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.search import search
from jax_deepcompile.planner.strategies import STRATEGIES
from jax_deepcompile.planner.strategy import Strategy


def make_plan(
    program: Program, environment: Environment, fingerprint: str, strategies: tuple[Strategy, ...] = STRATEGIES
) -> Candidate:
    """The best plan for ``program`` on ``environment``, by simulated step time under its memory limit.

    Args:
      fingerprint: of the program on the environment; stands in the plan.

    Raises:
      MemoryExceededError: the program does not fit, whatever the plan.
    """
    return search(program, environment, strategies, Plan(fingerprint).replace(options=_options(program, environment)))


def argument_bytes(program: Program) -> int:
    """What one device holds of the arguments of ``program``; XLA is not given those that nothing reads."""
    jaxpr = open_jaxpr(program.jaxpr)
    read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, jex.Var)}
    return sum(size_bytes(var) for var in jaxpr.invars if var in read)


def _options(program: Program, environment: Environment) -> Options:
    if environment.platform != "cuda":
        return {}
    if environment.limit_bytes is None:
        return kernels_once()
    held = argument_bytes(program)
    return kernels_once() | memory_options(environment.limit_bytes, held, environment.costs.hardware.memory_bytes)
