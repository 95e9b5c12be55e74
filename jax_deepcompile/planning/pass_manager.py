"""Proposals tried one after the other: rewritten, compiled, simulated, kept or taken back. Knows no pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulator import Simulation, simulate
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import compile_options
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.lowering.hlo import read
from jax_deepcompile.lowering.latencies import Latency
from jax_deepcompile.planning.apply import apply_plan
from jax_deepcompile.planning.plan import Plan, Prediction, Record


@dataclass(frozen=True)
class Environment:
    """What a program is planned for.

    Attributes:
      mesh: the devices.
      platform: ``cuda`` or ``cpu``.
      costs: what things take on it.
      limit_bytes: device memory a step may take; None for no limit.
    """

    mesh: AnyMesh
    platform: str
    costs: CostModel
    limit_bytes: int | None


@dataclass(frozen=True)
class Trial:
    """A plan carried out and compiled.

    Attributes:
      plan: the decisions.
      program: the base program rewritten by them.
      simulation: of the compiled module.
      prediction: its figures.
      argument_bytes: state and batch, of ``prediction.peak_bytes``.
    """

    plan: Plan
    program: Program
    simulation: Simulation
    prediction: Prediction
    argument_bytes: int


@dataclass(frozen=True)
class Proposal:
    """A plan that a pass would rather have, and why in words."""

    plan: Plan
    decision: str


class Pass(Protocol):
    """Proposes changes to a plan; all of them legal, none of them tried."""

    @property
    def name(self) -> str: ...

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterable[Proposal]:
        """Plans that may be better than ``now``'s, the most promising first.

        Args:
          base: the fully sharded program that plans are carried out on.
          now: the best so far.
          environment: what it is for.
        """
        ...


def run_passes(base: Program, environment: Environment, passes: Sequence[Pass], start: Plan) -> Trial:
    """The best plan found: each pass's proposals are tried in turn, and the best that fits and gains is kept.

    Raises:
      MemoryExceededError: not even ``start`` fits the limit.
    """
    now = attempt(base, start, environment)
    records: list[Record] = []
    for step in passes:
        for _ in range(_ROUNDS):
            best, tried = _best_proposal(step, base, now, environment)
            records += tried
            if best is now:
                break
            now = best
    if environment.limit_bytes is not None and now.prediction.peak_bytes > environment.limit_bytes:
        raise errors.MemoryExceededError(
            base.name, now.prediction.peak_bytes, environment.limit_bytes, now.argument_bytes
        )
    plan = now.plan.replace(prediction=now.prediction, records=tuple(records))
    return Trial(plan, now.program, now.simulation, now.prediction, now.argument_bytes)


_ROUNDS = 3
"""How often a pass that gained is asked again, now that the truth about its last proposal is known."""


def _best_proposal(step: Pass, base: Program, now: Trial, environment: Environment) -> tuple[Trial, list[Record]]:
    best, records = now, []
    for proposal in step.propose(base, now, environment):
        if proposal.plan == now.plan:
            continue
        began = time.perf_counter()
        trial = attempt(base, proposal.plan, environment)
        reason = _objection(trial, best, environment)
        wall_s = time.perf_counter() - began
        change = reason or f"{best.prediction.step_s:.4g} s to {trial.prediction.step_s:.4g} s"
        records.append(
            Record(step.name, proposal.decision, best.prediction, trial.prediction, not reason, change, wall_s)
        )
        best = best if reason else trial
    return best, records


def attempt(base: Program, plan: Plan, environment: Environment) -> Trial:
    """Rewrites, compiles and simulates; where communication stays exposed, lets XLA schedule by the simulated times."""
    program = apply_plan(base, environment.mesh, plan)
    lowered = lower(program, environment.mesh, environment.platform)
    trial = _compiled(program, lowered, plan.replace(latencies=()), environment)
    expected = trial.prediction
    if environment.platform != "cuda" or expected.exposed_s < _NOTABLE * expected.step_s:
        return trial
    told = _compiled(program, lowered, plan.replace(latencies=_latencies(trial.simulation)), environment)
    return trial if _objection(told, trial, environment) else told


_NOTABLE = 0.01
"""The share of a step that must be exposed communication before a second compilation is spent on its schedule."""


def _compiled(program: Program, lowered: jax.stages.Lowered, plan: Plan, environment: Environment) -> Trial:
    options: dict[str, Any] = compile_options(environment.platform) | plan.compiler_options()
    compiled = lowered.compile(compiler_options=options or None)
    memory: Any = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    peak = arguments + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    simulation = simulate(read(compiled.as_text() or ""), environment.costs)
    prediction = Prediction(
        simulation.step_s,
        simulation.compute_s,
        simulation.communication_s,
        simulation.exposed_communication_s,
        peak,
    )
    return Trial(plan, program, simulation, prediction, arguments)


def _latencies(simulation: Simulation) -> tuple[Latency, ...]:
    lasting = {event.name: 1e6 * (event.end_s - event.start_s) for event in simulation.timeline}
    return tuple(Latency(name, round(microseconds, 3)) for name, microseconds in sorted(lasting.items()))


def _objection(trial: Trial, best: Trial, environment: Environment) -> str:
    """Why ``trial`` does not replace ``best``; empty if it does."""
    peak, limit = trial.prediction.peak_bytes, environment.limit_bytes
    fits = limit is None or peak <= limit
    best_fits = limit is None or best.prediction.peak_bytes <= limit
    if not fits and (best_fits or peak >= best.prediction.peak_bytes):
        return f"takes {peak / 2**30:.1f} GiB of {(limit or 0) / 2**30:.1f}"
    if fits and not best_fits:
        return ""
    if trial.prediction.step_s >= best.prediction.step_s:
        return f"no faster: {trial.prediction.step_s:.4g} s against {best.prediction.step_s:.4g} s"
    return ""
