"""Proposals tried one after the other: rewritten, compiled, simulated, kept or taken back. Knows no pass."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import jax

from jax_deepcompile import errors
from jax_deepcompile.costs.simulator import simulate
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import strictly_limited, two_collectives
from jax_deepcompile.planner.candidate import WORTH_TRYING, Environment, Trial, attempt, compiled, fits, prediction_of
from jax_deepcompile.planner.limits import largest_temporaries
from jax_deepcompile.planner.plan import Plan, Record
from jax_deepcompile.planner.records import that_led_to
from jax_deepcompile.planner.scheduler_latencies import told_latencies
from jax_deepcompile.runtime.parallel import in_parallel, results_of


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


@runtime_checkable
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


@runtime_checkable
class Opening(Protocol):
    """A pass that looks at the program alone: its proposals are tried beside the plan that all begins with."""

    @property
    def name(self) -> str: ...

    def open(self, base: Program, start: Plan, environment: Environment) -> Iterable[Proposal]:
        """Plans that may be better than ``start``; arguments as for ``Pass.propose``."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A pass that looks at what comes of all others: its proposals are scheduled before they are judged."""

    @property
    def name(self) -> str: ...

    def close(self, base: Program, now: Trial, environment: Environment) -> Iterable[Proposal]:
        """Plans that may be better than ``now``'s; arguments as for ``Pass.propose``."""
        ...


AnyPass: TypeAlias = Opening | Pass | Closing


def run_passes(base: Program, environment: Environment, passes: Sequence[AnyPass], start: Plan) -> Trial:
    """The best plan found: each pass's proposals are tried in turn, and the best that fits and gains is kept.

    Raises:
      MemoryExceededError: not even ``start`` fits the limit.
    """
    # Errors: a compilation that was left behind on Ctrl-C may still be writing into it.
    with tempfile.TemporaryDirectory(prefix="deepcompile_kernels_", ignore_cleanup_errors=True) as folder:
        return _run(base, dataclasses.replace(environment, kernels=Path(folder) / "kernels"), passes, start)


def _run(base: Program, environment: Environment, passes: Sequence[AnyPass], start: Plan) -> Trial:
    openings = [each for each in passes if isinstance(each, Opening)]
    environment, opened = _opened(base, environment, openings, start)
    first, *others = itertools.chain(*opened)
    if first.trial is None:
        raise first.failure or AssertionError("what did not fail was tried")
    taken, known = [first.trial], {start, *(each.trial.plan for each in others if each.trial is not None)}
    records: list[Record] = []
    for opening, tried in zip(openings, opened[1:], strict=True):
        best, told_of = _best_tried(opening.name, taken[-1], tried, environment.expected_s, environment, of=first.trial)
        records += told_of
        if best is not taken[-1]:
            taken.append(best)
    for step in (each for each in passes if isinstance(each, Pass)):
        for _ in range(_ROUNDS):
            proposals = [each for each in step.propose(base, taken[-1], environment) if each.plan not in known]
            known |= {each.plan for each in proposals}
            (tried,) = _all_tried(base, [proposals], environment)
            others += tried
            best, told_of = _best_tried(step.name, taken[-1], tried, environment.expected_s, environment)
            records += told_of
            if best is taken[-1]:
                break
            gained = 1 - environment.expected_s(best) / environment.expected_s(taken[-1])
            taken.append(best)
            if gained < _WORTH_ANOTHER:
                break
    taken, records = _with_what_was_left(taken, others, records, environment)
    now, tried = _scheduled(taken, environment)
    records += tried
    for closing in (each for each in passes if isinstance(each, Closing)):
        now, tried = _closed(base, closing, now, environment)
        records += tried
    return _fitting(now, environment, that_led_to(now.prediction, records))


def _with_what_was_left(
    taken: list[Trial], tried: Sequence[_Tried], records: Sequence[Record], environment: Environment
) -> tuple[list[Trial], list[Record]]:
    """The fastest of all that was ``tried``, if it was left for the memory it takes and nobody else has a use for that.

    Args:
      taken: what was taken so far, the last one being the best.
      tried: everything.
      records: of each.
      environment: what it is for.
    """
    now_s = environment.expected_s(taken[-1])
    fitting = {place: each.trial for place, each in enumerate(tried) if each.trial and fits(each.trial, environment)}
    place = min(fitting, key=lambda place: environment.expected_s(fitting[place]), default=None)
    if place is None or environment.expected_s(fitting[place]) > (1 - _WORTH_MEMORY) * now_s:
        return taken, list(records)
    change = f"{now_s:.4g} s to {environment.expected_s(fitting[place]):.4g} s"
    hoped = _hoped(environment.expected_s, taken[-1], fitting[place])
    reason = f"{change}{hoped}, in memory that nothing else needs"
    record = dataclasses.replace(records[place], taken=True, reason=reason)
    return [*taken, fitting[place]], [*records[:place], record, *records[place + 1 :]]


_WORTH_MEMORY = WORTH_TRYING / 2
"""The share of a step that there must be to gain for memory to be spent that nothing else needs."""


def carried_out(base: Program, plan: Plan, environment: Environment) -> Trial:
    """``plan`` as it is, with what it is predicted to take.

    Raises:
      MemoryExceededError: it does not fit the limit.
      PlanError: it is for another program.
    """
    return _fitting(attempt(base, plan, environment), environment, plan.records)


def _fitting(trial: Trial, environment: Environment, records: Sequence[Record]) -> Trial:
    """``trial``, its plan with its prediction and how it came about."""
    if environment.limit_bytes is not None and not fits(trial, environment):
        largest = largest_temporaries(trial.module, trial.simulation.memory)
        raise errors.MemoryExceededError(
            trial.program.name, trial.prediction.peak_bytes, environment.limit_bytes, trial.argument_bytes, largest
        )
    plan = trial.plan.replace(prediction=trial.prediction, records=tuple(records))
    return dataclasses.replace(trial, plan=plan)


def _opened(
    base: Program, environment: Environment, openings: Sequence[Opening], start: Plan
) -> tuple[Environment, list[list[_Tried]]]:
    """What became of ``start`` and of what each opening proposes instead, and the environment, now calibrated."""
    proposals = [
        [each for each in opening.open(base, start, environment) if each.plan != start] for opening in openings
    ]
    opened = _all_tried(base, [[Proposal(start, "")], *proposals], environment)
    first = opened[0][0].trial
    costs = environment.costs if first is None else environment.costs.calibrated(first.simulation)
    if costs is environment.costs:
        return environment, opened
    environment = dataclasses.replace(environment, costs=costs)
    return environment, [[each.judged(environment) for each in tried] for tried in opened]


_ROUNDS = 3
"""How often a pass that gained is asked again, now that the truth about its last proposal is known."""

_WORTH_ANOTHER = 0.01
"""The share of a step that it must have gained for that."""


@dataclass(frozen=True)
class _Tried:
    """What became of a decision that was tried.

    Attributes:
      decision: in words.
      trial: None if it failed.
      wall_s: what that took.
      failure: why it failed.
    """

    decision: str
    trial: Trial | None
    wall_s: float
    failure: Exception | None = None

    @classmethod
    def of(cls, decision: str, attempted: Callable[[], Trial]) -> _Tried:
        began = time.perf_counter()
        try:
            trial, failure = attempted(), None
        except (jax.errors.JaxRuntimeError, errors.InvariantError, errors.PlanError) as error:
            trial, failure = None, error
        return cls(decision, trial, time.perf_counter() - began, failure)

    def judged(self, environment: Environment) -> _Tried:
        """The same by other costs."""
        if self.trial is None:
            return self
        simulation = simulate(self.trial.module, environment.costs)
        prediction = prediction_of(simulation, self.trial.prediction.peak_bytes)
        trial = dataclasses.replace(self.trial, simulation=simulation, prediction=prediction)
        return dataclasses.replace(self, trial=trial)


def _all_tried(base: Program, proposals: Sequence[Sequence[Proposal]], environment: Environment) -> list[list[_Tried]]:
    """What became of the ``proposals`` of each of several passes.

    As many are tried at a time as there are cores: most of a trial is one thread of XLA.
    """
    ladders = [_attempt_or_less(base, each, environment) for of_one_pass in proposals for each in of_one_pass]
    tried = iter(in_parallel(ladders))
    return [[each for _ in of_one_pass for each in next(tried)] for of_one_pass in proposals]


def _attempt_or_less(base: Program, proposal: Proposal | None, environment: Environment) -> Iterator[_Tried]:
    """The proposal and, as long as they do not fit, the more modest ones."""
    while proposal is not None:
        tried = _Tried.of(proposal.decision, partial(attempt, base, proposal.plan, environment))
        yield tried
        proposal = None if tried.trial is not None and fits(tried.trial, environment) else proposal.otherwise


def _best_tried(
    name: str,
    now: Trial,
    tried: Sequence[_Tried],
    seconds: Callable[[Trial], float],
    environment: Environment,
    is_last: bool = False,
    of: Trial | None = None,
) -> tuple[Trial, list[Record]]:
    """The best of ``now`` and what was tried by ``seconds``, and what became of each trial.

    Memory is spent for time, unless this ``is_last`` and nobody else has a use for it. What was tried are changes of
    ``now``, unless it says ``of`` what.
    """
    best, of = now, of or now

    def objection_to(trial: Trial) -> str:
        spent = 0.0 if is_last else _spent(trial, best, environment)
        return _objection(trial, best, environment, seconds, max(_TOLD_APART, spent * WORTH_TRYING))

    for each in tried:
        if each.trial is not None and not objection_to(each.trial):
            best = each.trial
    records = []
    for each in tried:
        if each.trial is None:
            failed = f"could not be compiled: {_first_line(each.failure)}"
            records.append(Record(name, each.decision, of.prediction, None, False, failed, each.wall_s))
            continue
        change = f"{seconds(of):.4g} s to {seconds(each.trial):.4g} s" + _hoped(seconds, of, each.trial)
        objection = "" if each.trial is best else objection_to(each.trial)
        taken, after = each.trial is best, each.trial.prediction
        records.append(Record(name, each.decision, of.prediction, after, taken, objection or change, each.wall_s))
    return best, records


def _hoped(seconds: Callable[[Trial], float], *trials: Trial) -> str:
    """What to say of ``seconds`` where they are not those of the ``trials`` as they were compiled."""
    return "" if all(seconds(trial) == _step_s(trial) for trial in trials) else " once scheduled"


def _first_line(failure: Exception | None) -> str:
    return next(iter(str(failure).splitlines()), "")[:200]


def _scheduled(taken: Sequence[Trial], environment: Environment) -> tuple[Trial, list[Record]]:
    """Where communication stays exposed: compiled again, with XLA told the simulated times to schedule by.

    A schedule that hides more may need more memory: if it needs too much, XLA is held to the limit more strictly. If it
    fits but does not hide what it might, others are tried. Where a plan that was taken before the last one may still be
    faster, it is scheduled in the same way.

    Args:
      taken: what was taken so far, the last one being the best.
      environment: what it is for.
    """
    records: list[Record] = []
    best = min((trial for trial in taken if fits(trial, environment)), key=_step_s, default=taken[-1])
    if environment.platform != "cuda" or not taken[-1].waits:
        return best, records
    for trial in taken[: -_ROUNDS - 1 : -1]:
        hoped_s = (1 + _MISSED) * environment.expected_s(trial)
        if trial is not taken[-1] and fits(best, environment) and hoped_s >= _step_s(best):
            continue
        told = trial.plan.replace(latencies=told_latencies(trial.simulation))
        tried = [_scheduled_by(told, "XLA is told latencies", trial, environment)]
        scheduled, strict = tried[0].trial, told.replace(options=strictly_limited(dict(told.options)))
        if scheduled is not None and not fits(scheduled, environment) and strict != told:
            tried.append(_scheduled_by(strict, "and held to the limit", trial, environment))
        elif scheduled is not None and fits(scheduled, environment) and _step_s(scheduled) > hoped_s:
            tried += _otherwise_scheduled(told, trial, environment)
        best, told_of = _best_tried("schedule", best, tried, _step_s, environment, is_last=True, of=trial)
        records += told_of
    return best, records


def _otherwise_scheduled(told: Plan, trial: Trial, environment: Environment) -> list[_Tried]:
    """Other schedules of ``trial``, where what XLA is ``told`` made none that hides enough.

    With two collectives in flight at a time the network is not idle until compute comes to where the next one starts;
    simulated, they follow one another. With a little less said of each, all may find room in a loop that has just as
    much compute as communication.
    """
    options, latencies = dict(told.options) | two_collectives(), told_latencies(trial.simulation, at_a_time=2)
    others = {
        "and two collectives at a time": told.replace(options=options, latencies=latencies),
        "a little less of collectives": told.replace(latencies=told_latencies(trial.simulation, scale=_LESS)),
    }
    return results_of(partial(_scheduled_by, plan, decision, trial, environment) for decision, plan in others.items())


_LESS = 0.95


def _scheduled_by(plan: Plan, decision: str, trial: Trial, environment: Environment) -> _Tried:
    return _Tried.of(decision, partial(compiled, trial.program, trial.lowered, plan, environment))


def _closed(base: Program, closing: Closing, now: Trial, environment: Environment) -> tuple[Trial, list[Record]]:
    try:
        proposals = list(closing.close(base, now, environment))
    except (errors.InvariantError, errors.PlanError) as error:
        failed = f"could not be proposed: {_first_line(error)}"
        return now, [Record(closing.name, "another schedule", now.prediction, None, False, failed, 0.0)]
    tried = results_of(
        partial(_Tried.of, each.decision, partial(_attempt_scheduled, base, each.plan, environment))
        for each in proposals
    )
    return _best_tried(closing.name, now, tried, _step_s, environment, is_last=True)


def _attempt_scheduled(base: Program, plan: Plan, environment: Environment) -> Trial:
    """``plan`` carried out, and scheduled by what that takes."""
    trial = attempt(base, plan.replace(latencies=()), environment)
    if environment.platform != "cuda" or not trial.waits:
        return trial
    told = trial.plan.replace(latencies=told_latencies(trial.simulation))
    return compiled(trial.program, trial.lowered, told, environment)


_MISSED = 0.02
"""The share of a step by which schedules usually miss what is attainable."""


def _step_s(trial: Trial) -> float:
    return trial.prediction.step_s


def _spent(trial: Trial, best: Trial, environment: Environment) -> float:
    """The share of the memory that ``best`` leaves which ``trial`` takes, from 0 to 1."""
    if environment.limit_bytes is None:
        return 0.0
    left_bytes = max(environment.limit_bytes - best.prediction.peak_bytes, 1)
    return min(max((trial.prediction.peak_bytes - best.prediction.peak_bytes) / left_bytes, 0.0), 1.0)


def _objection(
    trial: Trial, best: Trial, environment: Environment, seconds: Callable[[Trial], float], least: float
) -> str:
    """Why ``trial`` does not replace ``best``, of whose time it must save the share ``least``; empty if it does."""
    peak, limit = trial.prediction.peak_bytes, environment.limit_bytes
    keeps_it, best_keeps_it = fits(trial, environment), fits(best, environment)
    if not keeps_it and (best_keeps_it or peak >= best.prediction.peak_bytes):
        return f"takes {peak / 2**30:.1f} GiB of {(limit or 0) / 2**30:.1f}"
    if keeps_it and not best_keeps_it:
        return ""
    if seconds(trial) > (1 - least) * seconds(best):
        slower = seconds(trial) > (1 - _TOLD_APART) * seconds(best)
        grounds = "no faster" if slower else f"for {peak / 2**30:.1f} GiB hardly faster"
        return f"{grounds}: {seconds(trial):.4g} s against {seconds(best):.4g} s" + _hoped(seconds, trial, best)
    return ""


_TOLD_APART = 0.001
"""The share of a step that a change must save to be taken: for less no plan is made longer."""
