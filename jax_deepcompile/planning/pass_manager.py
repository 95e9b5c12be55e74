"""Proposals tried one after the other: rewritten, compiled, simulated, kept or taken back. Knows no pass."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.operation import Stream
from jax_deepcompile.costs.simulator import Simulation, simulate
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import (
    alone_options,
    compile_options,
    peak_bytes,
    strictly_limited,
    two_collectives,
)
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

    def expected_s(self, trial: Trial) -> float:
        """The step a plan will take once it is scheduled: XLA:GPU is told latencies last, when all else is decided.

        Only pipelined loops have work beside every collective of theirs.
        """
        schedules = self.platform == "cuda" and trial.plan.loops
        return trial.simulation.attainable_s if schedules else trial.prediction.step_s


@dataclass(frozen=True)
class Trial:
    """A plan carried out and compiled.

    Attributes:
      plan: the decisions.
      program: the base program rewritten by them.
      lowered: the same, for the compiler.
      simulation: of the compiled module.
      prediction: its figures.
      argument_bytes: state and batch, of ``prediction.peak_bytes``.
    """

    plan: Plan
    program: Program
    lowered: jax.stages.Lowered
    simulation: Simulation
    prediction: Prediction
    argument_bytes: int


@dataclass(frozen=True)
class Proposal:
    """A plan that a pass would rather have.

    Attributes:
      plan: the decisions.
      decision: what it changes, in words.
      otherwise: a more modest proposal, tried if this one does not fit.
    """

    plan: Plan
    decision: str
    otherwise: Proposal | None = None


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
    first = attempt(base, start, environment)
    costs = environment.costs.calibrated(first.simulation)
    if costs is not environment.costs:
        environment = dataclasses.replace(environment, costs=costs)
        first = attempt(base, start, environment)
    taken = [first]
    records: list[Record] = []
    for step in passes:
        for _ in range(_ROUNDS):
            best, tried = _best_proposal(step, base, taken[-1], environment)
            records += tried
            if best is taken[-1]:
                break
            gained = 1 - environment.expected_s(best) / environment.expected_s(taken[-1])
            taken.append(best)
            if gained < _WORTH_ANOTHER:
                break
    now, tried = _scheduled(taken, environment)
    records += tried
    if environment.limit_bytes is not None and not _fits(now, environment):
        raise errors.MemoryExceededError(
            base.name, now.prediction.peak_bytes, environment.limit_bytes, now.argument_bytes
        )
    plan = now.plan.replace(prediction=now.prediction, records=tuple(records))
    return dataclasses.replace(now, plan=plan)


_ROUNDS = 3
"""How often a pass that gained is asked again, now that the truth about its last proposal is known."""

_WORTH_ANOTHER = 0.01
"""The share of a step that it must have gained for that."""


@dataclass(frozen=True)
class _Tried:
    """A trial, the decision that it tries, and the seconds that took."""

    decision: str
    trial: Trial
    wall_s: float

    @classmethod
    def of(cls, decision: str, attempted: Callable[[], Trial]) -> _Tried:
        began = time.perf_counter()
        return cls(decision, attempted(), time.perf_counter() - began)


def _best_proposal(step: Pass, base: Program, now: Trial, environment: Environment) -> tuple[Trial, list[Record]]:
    """The best of ``now`` and what ``step`` proposes.

    As many proposals are tried at a time as there are cores: most of a trial is one thread of XLA.
    """
    proposals = [each for each in step.propose(base, now, environment) if each.plan != now.plan]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = list(itertools.chain(*pool.map(lambda each: _attempt_or_less(base, each, environment), proposals)))
    return _best_tried(step.name, now, tried, environment.expected_s, environment)


def _attempt_or_less(base: Program, proposal: Proposal, environment: Environment) -> list[_Tried]:
    """The proposal and, as long as they do not fit, the more modest ones."""
    tried = _Tried.of(proposal.decision, lambda: attempt(base, proposal.plan, environment))
    if proposal.otherwise is None or _fits(tried.trial, environment):
        return [tried]
    return [tried, *_attempt_or_less(base, proposal.otherwise, environment)]


def _best_tried(
    name: str, now: Trial, tried: Sequence[_Tried], seconds: Callable[[Trial], float], environment: Environment
) -> tuple[Trial, list[Record]]:
    """The best of ``now`` and what was tried by ``seconds``, and what became of each trial."""
    best = now
    for each in tried:
        best = best if _objection(each.trial, best, environment, seconds) else each.trial
    records = []
    for each in tried:
        change = f"{seconds(now):.4g} s to {seconds(each.trial):.4g} s"
        objection = "" if each.trial is best else _objection(each.trial, best, environment, seconds)
        taken, after = each.trial is best, each.trial.prediction
        records.append(Record(name, each.decision, now.prediction, after, taken, objection or change, each.wall_s))
    return best, records


def _scheduled(taken: Sequence[Trial], environment: Environment) -> tuple[Trial, list[Record]]:
    """Where communication stays exposed: compiled again, with XLA told the simulated times to schedule by.

    A schedule that hides more may need more memory: if it needs too much, XLA is held to the limit more strictly. If it
    fits but does not hide what it might, two collectives may be in flight at a time, so that the network is not idle
    until compute comes to where the next one starts; simulated, they follow one another. Where a plan that was taken
    before the last one may still be faster, it is scheduled in the same way.

    Args:
      taken: what was taken so far, the last one being the best.
      environment: what it is for.
    """
    records: list[Record] = []
    best = min((trial for trial in taken if _fits(trial, environment)), key=_step_s, default=taken[-1])
    expected = taken[-1].prediction
    if environment.platform != "cuda" or expected.exposed_s < _NOTABLE * expected.step_s:
        return best, records
    for trial in taken[: -_ROUNDS - 1 : -1]:
        hoped_s = (1 + _MISSED) * environment.expected_s(trial)
        if trial is not taken[-1] and _fits(best, environment) and hoped_s >= _step_s(best):
            continue
        told = trial.plan.replace(latencies=_latencies(trial.simulation))
        tried = [_scheduled_by(told, "XLA is told latencies", trial, environment)]
        strict = told.replace(options=strictly_limited(dict(told.options)))
        if not _fits(tried[0].trial, environment) and strict != told:
            tried.append(_scheduled_by(strict, "and held to the limit", trial, environment))
        elif _fits(tried[0].trial, environment) and _step_s(tried[0].trial) > hoped_s:
            options, latencies = dict(told.options) | two_collectives(), _latencies(trial.simulation, _SHARING)
            shared = told.replace(options=options, latencies=latencies)
            tried.append(_scheduled_by(shared, "and two collectives at a time", trial, environment))
        best, told_of = _best_tried("schedule", best, tried, _step_s, environment)
        records += told_of
    return best, records


def _scheduled_by(plan: Plan, decision: str, trial: Trial, environment: Environment) -> _Tried:
    return _Tried.of(decision, partial(_compiled, trial.program, trial.lowered, plan, environment))


_NOTABLE = 0.01
"""The share of a step that must be exposed communication before another compilation is spent on its schedule."""

_SHARING = 1.9
"""How many times as long a collective takes beside another: they share the network. A little less than 2, lest their
ends come after the end of the loop that has just as much else to do."""

_MISSED = 0.02
"""The share of a step by which schedules usually miss what is attainable."""


def attempt(base: Program, plan: Plan, environment: Environment) -> Trial:
    """Rewrites, compiles and simulates."""
    program = apply_plan(base, environment.mesh, plan)
    lowered = lower(program, environment.mesh, environment.platform)
    return _compiled(program, lowered, plan, environment)


def _compiled(program: Program, lowered: jax.stages.Lowered, plan: Plan, environment: Environment) -> Trial:
    platform = environment.platform
    options: dict[str, Any] = compile_options(platform) | alone_options(platform) | plan.compiler_options()
    compiled = lowered.compile(compiler_options=options or None)
    memory: Any = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    simulation = simulate(read(compiled.as_text() or ""), environment.costs)
    prediction = Prediction(
        simulation.step_s,
        simulation.compute_s,
        simulation.communication_s,
        simulation.exposed_communication_s,
        peak_bytes(memory),
        simulation.bound_s,
    )
    return Trial(plan, program, lowered, simulation, prediction, arguments)


def _latencies(simulation: Simulation, of_communication: float = 1.0) -> tuple[Latency, ...]:
    """What everything takes, collectives ``of_communication`` times as long."""
    lasting = {
        event.name: 1e6 * (event.end_s - event.start_s) * (of_communication if event.stream is Stream.NETWORK else 1.0)
        for event in simulation.timeline
    }
    return tuple(Latency(name, round(microseconds, 3)) for name, microseconds in sorted(lasting.items()))


def _step_s(trial: Trial) -> float:
    return trial.prediction.step_s


def _objection(trial: Trial, best: Trial, environment: Environment, seconds: Callable[[Trial], float]) -> str:
    """Why ``trial`` does not replace ``best``; empty if it does."""
    peak, limit = trial.prediction.peak_bytes, environment.limit_bytes
    fits, best_fits = _fits(trial, environment), _fits(best, environment)
    if not fits and (best_fits or peak >= best.prediction.peak_bytes):
        return f"takes {peak / 2**30:.1f} GiB of {(limit or 0) / 2**30:.1f}"
    if fits and not best_fits:
        return ""
    if seconds(trial) >= seconds(best):
        return f"no faster: {seconds(trial):.4g} s against {seconds(best):.4g} s"
    return ""


def _fits(trial: Trial, environment: Environment) -> bool:
    return environment.limit_bytes is None or trial.prediction.peak_bytes <= environment.limit_bytes
