"""The search: proposals are evaluated in turn, and the best that fits and gains is accepted. It knows no strategy."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import strictly_limited, two_collectives
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment, compiled, evaluate
from jax_deepcompile.planner.limits import largest_temporaries
from jax_deepcompile.planner.plan import Plan, Record
from jax_deepcompile.planner.records import that_led_to
from jax_deepcompile.planner.scheduler_latencies import scheduler_latencies
from jax_deepcompile.planner.strategy import Proposal, Stage, Strategy
from jax_deepcompile.runtime.parallel import in_parallel, results_of
from jax_deepcompile.runtime.progress import Progress


def search(base: Program, environment: Environment, strategies: Sequence[Strategy], start: Plan) -> Candidate:
    """The best plan found: each strategy's proposals are evaluated, and the best that fits and gains is accepted.

    Raises:
      MemoryExceededError: not even ``start`` fits the limit.
    """
    # Errors: a compilation that was left behind on Ctrl-C may still be writing into it.
    kernels = tempfile.TemporaryDirectory(prefix="deepcompile_kernels_", ignore_cleanup_errors=True)
    with kernels as folder, Progress(f"planning {base.name}") as progress:
        environment = environment.replace(kernels=Path(folder) / "kernels")
        return _run(base, environment, strategies, start, _Journal(progress))


@dataclass
class _Journal:
    """What became of each proposal so far, told as it becomes known."""

    progress: Progress
    records: list[Record] = field(default_factory=list)

    def add(self, records: Sequence[Record]) -> None:
        self.records += records
        for each in records:
            self.progress.say(
                f"{each.strategy} {'accepted' if each.accepted else 'rejected'}: {each.decision}: {each.reason}"
            )


def _run(
    base: Program, environment: Environment, strategies: Sequence[Strategy], start: Plan, journal: _Journal
) -> Candidate:
    openings = [each for each in strategies if each.stage is Stage.OPENING]
    environment, opened = _opened(base, environment, openings, start)
    first, *others = itertools.chain(*opened)
    if first.candidate is None:
        raise first.failure or AssertionError("what did not fail was evaluated")
    accepted = [first.candidate]
    known = {start, *(each.candidate.plan for each in others if each.candidate is not None)}
    for opening, evaluated in zip(openings, opened[1:], strict=True):
        best, records_of = _best_of(
            opening.name, accepted[-1], evaluated, environment.expected_s, environment, of=first.candidate
        )
        journal.add(records_of)
        if best is not accepted[-1]:
            accepted.append(best)
    for step in (each for each in strategies if each.stage is Stage.MAIN):
        for _ in range(_ROUNDS):
            proposed = _enabled(step.propose(base, accepted[-1], environment), environment)
            proposals = [each for each in proposed if each.plan not in known]
            known |= {each.plan for each in proposals}
            (evaluated,) = _all_evaluated(base, [proposals], environment)
            others += evaluated
            best, records_of = _best_of(step.name, accepted[-1], evaluated, environment.expected_s, environment)
            journal.add(records_of)
            if best is accepted[-1]:
                break
            gained = 1 - environment.expected_s(best) / environment.expected_s(accepted[-1])
            accepted.append(best)
            if gained < _WORTH_ANOTHER:
                break
    accepted, journal.records = _with_rejected_for_memory(accepted, others, journal.records, environment)
    now, evaluated = _scheduled(accepted, environment)
    journal.add(evaluated)
    for closing in (each for each in strategies if each.stage is Stage.CLOSING):
        now, evaluated = _closed(base, closing, now, environment)
        journal.add(evaluated)
    return _fitting(now, environment, that_led_to(now.prediction, journal.records))


def _with_rejected_for_memory(
    accepted: list[Candidate], evaluated: Sequence[_Evaluated], records: Sequence[Record], environment: Environment
) -> tuple[list[Candidate], list[Record]]:
    """The fastest of all ``evaluated``, if it was rejected for memory that nobody else has a use for.

    Args:
      accepted: what was accepted so far, the last one being the best.
      evaluated: everything.
      records: of each.
      environment: what it is for.
    """
    now_s = environment.expected_s(accepted[-1])
    fitting = {
        place: each.candidate
        for place, each in enumerate(evaluated)
        if each.candidate and environment.fits(each.candidate)
    }
    place = min(fitting, key=lambda place: environment.expected_s(fitting[place]), default=None)
    if place is None or environment.expected_s(fitting[place]) > (1 - _WORTH_MEMORY) * now_s:
        return accepted, list(records)
    change = f"{now_s:.4g} s to {environment.expected_s(fitting[place]):.4g} s"
    promised = _once_scheduled(environment.expected_s, accepted[-1], fitting[place])
    reason = f"{change}{promised}, in memory that nothing else needs"
    record = dataclasses.replace(records[place], accepted=True, reason=reason)
    return [*accepted, fitting[place]], [*records[:place], record, *records[place + 1 :]]


_WORTH_MEMORY = WORTH_TRYING / 2
"""The share of a step that there must be to gain for memory to be spent that nothing else needs."""


def carried_out(base: Program, plan: Plan, environment: Environment) -> Candidate:
    """``plan`` as it is, with what it is predicted to take.

    Raises:
      MemoryExceededError: it does not fit the limit.
      PlanError: it is for another program.
    """
    return _fitting(evaluate(base, plan, environment), environment, plan.records)


def _fitting(candidate: Candidate, environment: Environment, records: Sequence[Record]) -> Candidate:
    """``candidate``, its plan with its prediction and how it came about."""
    if environment.limit_bytes is not None and not environment.fits(candidate):
        largest = largest_temporaries(candidate.evaluated.module, candidate.simulation.memory)
        raise errors.MemoryExceededError(
            candidate.program.name,
            candidate.prediction.peak_bytes,
            environment.limit_bytes,
            candidate.evaluated.argument_bytes,
            largest,
        )
    plan = candidate.plan.replace(prediction=candidate.prediction, records=tuple(records))
    return dataclasses.replace(candidate, plan=plan)


def _opened(
    base: Program, environment: Environment, openings: Sequence[Strategy], start: Plan
) -> tuple[Environment, list[list[_Evaluated]]]:
    """What became of ``start`` and of what each opening proposes instead, and the environment, now calibrated."""
    proposals = [
        [
            each
            for each in _enabled(opening.propose(base, Candidate(start, base), environment), environment)
            if each.plan != start
        ]
        for opening in openings
    ]
    opened = _all_evaluated(base, [[Proposal(start, "")], *proposals], environment)
    first = opened[0][0].candidate
    costs = environment.costs if first is None else environment.costs.calibrated(first.simulation)
    if costs is environment.costs:
        return environment, opened
    return environment.replace(costs=costs), [[each.simulated_by(costs) for each in some] for some in opened]


_ROUNDS = 3
"""How often a pass that gained is asked again, now that the truth about its last proposal is known."""

_WORTH_ANOTHER = 0.01
"""The share of a step that it must have gained for that."""


@dataclass(frozen=True)
class _Evaluated:
    """What became of a decision that was evaluated.

    Attributes:
      decision: in words.
      candidate: None if it failed.
      wall_s: what that took.
      failure: why it failed.
    """

    decision: str
    candidate: Candidate | None
    wall_s: float
    failure: Exception | None = None

    @classmethod
    def of(cls, decision: str, evaluated: Callable[[], Candidate]) -> _Evaluated:
        began = time.perf_counter()
        try:
            candidate, failure = evaluated(), None
        except (jax.errors.JaxRuntimeError, errors.InvariantError, errors.PlanError) as error:
            candidate, failure = None, error
        return cls(decision, candidate, time.perf_counter() - began, failure)

    def simulated_by(self, costs: CostModel) -> _Evaluated:
        """The same by other costs."""
        candidate = self.candidate and self.candidate.simulated_by(costs)
        return dataclasses.replace(self, candidate=candidate)


def _enabled(proposals: Iterable[Proposal], environment: Environment) -> Iterator[Proposal]:
    """``proposals`` without the kinds of decisions that are left out."""

    def enabled(each: Proposal) -> Proposal:
        kept = tuple(one for one in each.plan.decisions if one.kind not in environment.disabled)
        otherwise = each.otherwise and enabled(each.otherwise)
        return dataclasses.replace(each, plan=each.plan.replace(decisions=kept), otherwise=otherwise)

    return map(enabled, proposals) if environment.disabled else iter(proposals)


def _all_evaluated(
    base: Program, proposals: Sequence[Sequence[Proposal]], environment: Environment
) -> list[list[_Evaluated]]:
    """What became of the ``proposals`` of each of several passes.

    As many are evaluated at a time as there are cores: most of a candidate is one thread of XLA.
    """
    ladders = [_evaluated_or_less(base, each, environment) for of_one_pass in proposals for each in of_one_pass]
    evaluated = iter(in_parallel(ladders))
    return [[each for _ in of_one_pass for each in next(evaluated)] for of_one_pass in proposals]


def _evaluated_or_less(base: Program, proposal: Proposal | None, environment: Environment) -> Iterator[_Evaluated]:
    """The proposal and, as long as they do not fit, the more modest ones."""
    while proposal is not None:
        evaluated = _Evaluated.of(proposal.decision, partial(evaluate, base, proposal.plan, environment))
        yield evaluated
        proposal = (
            None if evaluated.candidate is not None and environment.fits(evaluated.candidate) else proposal.otherwise
        )


def _best_of(
    name: str,
    now: Candidate,
    evaluated: Sequence[_Evaluated],
    seconds: Callable[[Candidate], float],
    environment: Environment,
    is_last: bool = False,
    of: Candidate | None = None,
) -> tuple[Candidate, list[Record]]:
    """The best of ``now`` and what was evaluated by ``seconds``, and what became of each candidate.

    Memory is spent for time, unless this ``is_last`` and nobody else has a use for it. What was evaluated changes
    ``now``, unless it says ``of`` what.
    """
    best, of = now, of or now

    def objection_to(candidate: Candidate) -> str:
        spent = 0.0 if is_last else _spent(candidate, best, environment)
        return _objection(candidate, best, environment, seconds, max(_LEAST_GAIN, spent * WORTH_TRYING))

    for each in evaluated:
        if each.candidate is not None and not objection_to(each.candidate):
            best = each.candidate
    records = []
    for each in evaluated:
        if each.candidate is None:
            failed = f"could not be compiled: {_first_line(each.failure)}"
            records.append(Record(name, each.decision, of.prediction, None, False, failed, each.wall_s))
            continue
        change = f"{seconds(of):.4g} s to {seconds(each.candidate):.4g} s" + _once_scheduled(
            seconds, of, each.candidate
        )
        objection = "" if each.candidate is best else objection_to(each.candidate)
        accepted, after = each.candidate is best, each.candidate.prediction
        records.append(Record(name, each.decision, of.prediction, after, accepted, objection or change, each.wall_s))
    return best, records


def _once_scheduled(seconds: Callable[[Candidate], float], *candidates: Candidate) -> str:
    """What to say of ``seconds`` where they are not those of the ``candidates`` as they were compiled."""
    return "" if all(seconds(candidate) == _step_s(candidate) for candidate in candidates) else " once scheduled"


def _first_line(failure: Exception | None) -> str:
    return next(iter(str(failure).splitlines()), "")[:200]


def _scheduled(accepted: Sequence[Candidate], environment: Environment) -> tuple[Candidate, list[Record]]:
    """Where communication stays exposed: compiled again, with XLA told the simulated times to schedule by.

    A schedule that hides more may need more memory: if it needs too much, XLA is held to the limit more strictly. If it
    fits but does not hide what it might, others are evaluated. Where a plan that was accepted before the last one may
    still be faster, it is scheduled in the same way.

    Args:
      accepted: what was accepted so far, the last one being the best.
      environment: what it is for.
    """
    records: list[Record] = []
    best = min((candidate for candidate in accepted if environment.fits(candidate)), key=_step_s, default=accepted[-1])
    if environment.platform != "cuda" or not accepted[-1].waits:
        return best, records
    for candidate in accepted[: -_ROUNDS - 1 : -1]:
        expected_s = (1 + _MISSED) * environment.expected_s(candidate)
        if candidate is not accepted[-1] and environment.fits(best) and expected_s >= _step_s(best):
            continue
        told = candidate.plan.replace(latencies=scheduler_latencies(candidate.simulation))
        evaluated = [_scheduled_by(told, "XLA is told latencies", candidate, environment)]
        scheduled, strict = evaluated[0].candidate, told.replace(options=strictly_limited(dict(told.options)))
        if scheduled is not None and not environment.fits(scheduled) and strict != told:
            evaluated.append(_scheduled_by(strict, "and held to the limit", candidate, environment))
        elif scheduled is not None and environment.fits(scheduled) and _step_s(scheduled) > expected_s:
            evaluated += _otherwise_scheduled(told, candidate, environment)
        best, records_of = _best_of("schedule", best, evaluated, _step_s, environment, is_last=True, of=candidate)
        records += records_of
    return best, records


def _otherwise_scheduled(told: Plan, candidate: Candidate, environment: Environment) -> list[_Evaluated]:
    """Other schedules of ``candidate``, where what XLA is ``told`` made none that hides enough.

    With two collectives in flight at a time the network is not idle until compute comes to where the next one starts;
    simulated, they follow one another. With a little less said of each, all may find room in a loop that has just as
    much compute as communication.
    """
    options, latencies = dict(told.options) | two_collectives(), scheduler_latencies(candidate.simulation, at_a_time=2)
    others = {
        "and two collectives at a time": told.replace(options=options, latencies=latencies),
        "a little less of collectives": told.replace(latencies=scheduler_latencies(candidate.simulation, scale=_LESS)),
    }
    return results_of(
        partial(_scheduled_by, plan, decision, candidate, environment) for decision, plan in others.items()
    )


_LESS = 0.95


def _scheduled_by(plan: Plan, decision: str, candidate: Candidate, environment: Environment) -> _Evaluated:
    return _Evaluated.of(decision, partial(compiled, candidate.program, candidate.evaluated.lowered, plan, environment))


def _closed(
    base: Program, closing: Strategy, now: Candidate, environment: Environment
) -> tuple[Candidate, list[Record]]:
    try:
        proposals = list(_enabled(closing.propose(base, now, environment), environment))
    except (errors.InvariantError, errors.PlanError) as error:
        failed = f"could not be proposed: {_first_line(error)}"
        return now, [Record(closing.name, "another schedule", now.prediction, None, False, failed, 0.0)]
    evaluated = results_of(
        partial(_Evaluated.of, each.decision, partial(_evaluate_scheduled, base, each.plan, environment))
        for each in proposals
    )
    return _best_of(closing.name, now, evaluated, _step_s, environment, is_last=True)


def _evaluate_scheduled(base: Program, plan: Plan, environment: Environment) -> Candidate:
    """``plan`` carried out, and scheduled by what that takes."""
    candidate = evaluate(base, plan.replace(latencies=()), environment)
    if environment.platform != "cuda" or not candidate.waits:
        return candidate
    told = candidate.plan.replace(latencies=scheduler_latencies(candidate.simulation))
    return compiled(candidate.program, candidate.evaluated.lowered, told, environment)


_MISSED = 0.02
"""The share of a step by which schedules usually miss what is attainable."""


def _step_s(candidate: Candidate) -> float:
    return candidate.prediction.step_s


def _spent(candidate: Candidate, best: Candidate, environment: Environment) -> float:
    """The share of the memory that ``best`` leaves which ``candidate`` takes, from 0 to 1."""
    if environment.limit_bytes is None:
        return 0.0
    left_bytes = max(environment.limit_bytes - best.prediction.peak_bytes, 1)
    return min(max((candidate.prediction.peak_bytes - best.prediction.peak_bytes) / left_bytes, 0.0), 1.0)


def _objection(
    candidate: Candidate, best: Candidate, environment: Environment, seconds: Callable[[Candidate], float], least: float
) -> str:
    """Why ``candidate`` does not replace ``best``, of whose time it must save the share ``least``; empty if it does."""
    peak, limit = candidate.prediction.peak_bytes, environment.limit_bytes
    keeps_it, best_keeps_it = environment.fits(candidate), environment.fits(best)
    if not keeps_it and (best_keeps_it or peak >= best.prediction.peak_bytes):
        return f"takes {peak / 2**30:.1f} GiB of {(limit or 0) / 2**30:.1f}"
    if keeps_it and not best_keeps_it:
        return ""
    if seconds(candidate) > (1 - least) * seconds(best):
        slower = seconds(candidate) > (1 - _LEAST_GAIN) * seconds(best)
        grounds = "no faster" if slower else f"for {peak / 2**30:.1f} GiB hardly faster"
        return f"{grounds}: {seconds(candidate):.4g} s against {seconds(best):.4g} s" + _once_scheduled(
            seconds, candidate, best
        )
    return ""


_LEAST_GAIN = 0.001
"""The share of a step that a change must save to be accepted: for less no plan is made longer."""
