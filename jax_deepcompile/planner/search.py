"""The search: proposals are evaluated in turn, and the best that fits and gains is accepted. It knows no strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import strictly_limited, two_collectives
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment, compiled, evaluate
from jax_deepcompile.planner.limits import largest_temporaries
from jax_deepcompile.planner.plan import Plan, Prediction, Record
from jax_deepcompile.planner.scheduler_latencies import scheduler_latencies
from jax_deepcompile.planner.strategy import Proposal, Stage, Strategy
from jax_deepcompile.runtime.parallel import in_parallel, results_of
from jax_deepcompile.runtime.progress import Progress

_ROUNDS = 3
"""How often a strategy that gained is asked again, now that the truth about its last proposal is known."""

_WORTH_ANOTHER = 0.01
"""The share of a step that it must have gained for that."""

_LEAST_GAIN = 0.001
"""The share of a step that a change must save to be accepted: for less no plan is made longer."""

_WORTH_MEMORY = WORTH_TRYING / 2
"""The share of a step that there must be to gain for memory to be spent that nothing else needs."""

_MISSED = 0.02
"""The share of a step by which schedules usually miss what is attainable."""

_RIVALS = 2
"""Plans that may be run beside the best one."""

_LESS = 0.95
"""Of what collectives take: what the scheduler is told where all of it finds no room."""


_LONGER, _NETWORKS, _LOST = 1.5, (0.8, 1.25), 0.005
"""Of what collectives take: what the scheduler is told at last; networks on which that is judged, by what it takes
there; and the share of the step that it may cost on this one."""

_ANY_BYTES = 1 << 62
"""More than any host has."""


def search(base: Program, environment: Environment, strategies: Sequence[Strategy], start: Plan) -> Candidate:
    """The best plan found: each strategy's proposals are evaluated, and the best that fits and gains is accepted.

    Raises:
      MemoryExceededError: not even ``start`` fits the limit.
    """
    with sharing_kernels(environment) as shared, Progress(f"planning {base.name}") as progress:
        return _Search(base, shared, progress).run(strategies, start)


@contextlib.contextmanager
def sharing_kernels(environment: Environment) -> Iterator[Environment]:
    """The environment with a file for kernels that one candidate compiles and another needs too."""
    # Errors: a compilation that was left behind on Ctrl-C may still be writing into it.
    with tempfile.TemporaryDirectory(prefix="deepcompile_kernels_", ignore_cleanup_errors=True) as folder:
        yield environment.replace(kernels=Path(folder) / "kernels")


def by_first_proposals(base: Program, environment: Environment, strategies: Sequence[Strategy], start: Plan) -> Plan:
    """``start`` with what each strategy proposes first, which nobody compiles or compares."""
    plan = start
    for strategy in strategies:
        best = Candidate(plan, plan.program(base, environment.mesh))
        plan = next((each.plan for each in proposed(strategy, base, best, environment)), plan)
    return plan


def proposed(strategy: Strategy, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
    """What ``strategy`` proposes, without the kinds of decisions that are left out."""
    disabled = environment.disabled

    def enabled(each: Proposal) -> Proposal:
        kept = tuple(one for one in each.plan.decisions if one.kind not in disabled)
        otherwise = each.otherwise and enabled(each.otherwise)
        return dataclasses.replace(each, plan=each.plan.replace(decisions=kept), otherwise=otherwise)

    proposals = strategy.propose(base, best, environment)
    return map(enabled, proposals) if disabled else iter(proposals)


def carried_out(base: Program, plan: Plan, environment: Environment) -> Candidate:
    """``plan`` as it is, with what it is predicted to take.

    Raises:
      HostMemoryExceededError, MemoryExceededError: it does not fit a limit.
      PlanError: it is for another program.
    """
    return _fitting(evaluate(base, plan, environment), environment, plan.records)


def _fitting(
    candidate: Candidate,
    environment: Environment,
    records: Sequence[Record],
    would_fit: Callable[[], Candidate | None] = lambda: None,
) -> Candidate:
    """``candidate``, its plan with its prediction and how it came about.

    Args:
      would_fit: finds what fits the device with more of the host's memory.
    """
    limit, peak, on_host = environment.limit_bytes, candidate.prediction.peak_bytes, candidate.prediction.host_bytes
    if limit is not None and peak > limit:
        other, largest = would_fit(), largest_temporaries(candidate.evaluated.module, candidate.simulation.memory)
        arguments, host_bytes = candidate.evaluated.argument_bytes, other.prediction.host_bytes if other else 0
        host = host_bytes, environment.host_bytes
        raise errors.MemoryExceededError(candidate.program.name, peak, limit, arguments, largest, *host)
    if on_host > environment.host_bytes:
        raise errors.HostMemoryExceededError(candidate.program.name, on_host, environment.host_bytes)
    plan = candidate.plan.replace(prediction=candidate.prediction, records=tuple(records))
    return dataclasses.replace(candidate, plan=plan)


@dataclass(frozen=True)
class _Evaluated:
    """What became of a decision that was evaluated: its candidate, or why it failed."""

    decision: str
    candidate: Candidate | None
    wall_s: float
    failure: Exception | None = None

    @classmethod
    def of(cls, decision: str, evaluated: Callable[[], Candidate]) -> _Evaluated:
        began = time.perf_counter()
        try:
            candidate, failure = evaluated(), None
        except (RuntimeError, errors.InvariantError, errors.PlanError) as error:  # XLA's checks raise it plain
            candidate, failure = None, error
        return cls(decision, candidate, time.perf_counter() - began, failure)

    def simulated_by(self, costs: CostModel) -> _Evaluated:
        return dataclasses.replace(self, candidate=self.candidate and self.candidate.simulated_by(costs))


@dataclass
class _Search:
    """One search, and what came of it so far.

    Attributes:
      environment: what it is for; its costs are calibrated by the first program that is compiled.
    """

    base: Program
    environment: Environment
    progress: Progress
    accepted: list[Candidate] = field(default_factory=list)
    evaluated: list[_Evaluated] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def run(self, strategies: Sequence[Strategy], start: Plan) -> Candidate:
        opening, main, closing = ([each for each in strategies if each.stage is stage] for stage in Stage)
        self._open(opening, start)
        known = {start, *(each.candidate.plan for each in self.evaluated if each.candidate is not None)}
        for strategy in main:
            self._improve(strategy, known)
        self._spend_memory()
        best = self._scheduled()
        for strategy in closing:
            best = self._closed(strategy, best)
        best = self._steadied(best)
        records = _that_led_to(best.prediction, self.records)
        found = _fitting(best, self.environment, records, partial(self._with_more_on_host, main, best))
        return dataclasses.replace(found, rivals=self._rivals(best), way=tuple(self._way(records)))

    def _way(self, records: Sequence[Record]) -> Iterator[tuple[str, Simulation]]:
        """The step before any change, and after each of ``records``, of all that was evaluated, that was accepted."""
        yield "", self.accepted[0].simulation
        for record, each in zip(records, self.evaluated, strict=True):
            if record.accepted and each.candidate is not None:
                yield record.strategy, each.candidate.simulation

    def _with_more_on_host(self, strategies: Sequence[Strategy], best: Candidate) -> Candidate | None:
        """What would fit the device if its host had more memory, where nothing fits with what it has."""
        larger = self.environment.replace(host_bytes=_ANY_BYTES)
        known = {each.candidate.plan for each in self.evaluated if each.candidate is not None}
        for strategy in strategies:
            for proposal in proposed(strategy, self.base, best, larger):
                for each in self._evaluated_or_less(proposal) if proposal.plan not in known else ():
                    if each.candidate is not None and larger.fits(each.candidate):
                        return each.candidate
        return None

    def _rivals(self, best: Candidate) -> tuple[Plan, ...]:
        """The plans that simulate fastest after ``best``, of those that fit."""
        compiled = [self.accepted[0], *(each.candidate for each in self.evaluated if each.candidate is not None)]
        others = {each.plan: each for each in compiled if each.plan != best.plan and self.environment.fits(each)}
        fastest = sorted(others.values(), key=_step_s)[:_RIVALS]
        return tuple(each.plan.replace(prediction=each.prediction) for each in fastest)

    def _open(self, openings: Sequence[Strategy], start: Plan) -> None:
        """Evaluates ``start`` and, beside it, what each of ``openings`` proposes instead."""
        not_evaluated = Candidate(start, self.base)
        proposals = [
            [each for each in proposed(opening, self.base, not_evaluated, self.environment) if each.plan != start]
            for opening in openings
        ]
        (first,), *opened = self._all_evaluated([[Proposal(start, "")], *proposals])
        if first.candidate is None:
            raise first.failure or AssertionError("what did not fail was evaluated")
        costs = self.environment.costs.calibrated(first.candidate.simulation)
        if costs is not self.environment.costs:
            self.environment = self.environment.replace(costs=costs)
            first, *opened = (
                first.simulated_by(costs),
                *([each.simulated_by(costs) for each in some] for some in opened),
            )
        assert first.candidate is not None
        self.accepted.append(first.candidate)
        for opening, evaluated in zip(openings, opened, strict=True):
            self._accept(opening.name, evaluated, of=first.candidate)

    def _improve(self, strategy: Strategy, known: set[Plan]) -> None:
        """Accepts what ``strategy`` proposes, as long as it gains; what is ``known`` is not evaluated again."""
        for _ in range(_ROUNDS):
            before = self.accepted[-1]
            proposals = [each for each in self._proposed(strategy, before, "a change") if each.plan not in known]
            known |= {each.plan for each in proposals}
            (evaluated,) = self._all_evaluated([proposals])
            self._accept(strategy.name, evaluated)
            seconds, after = self.environment.expected_s, self.accepted[-1]
            hardly = self.environment.fits(before) and 1 - seconds(after) / seconds(before) < _WORTH_ANOTHER
            if after is before or hardly:
                break

    def _accept(self, name: str, evaluated: Sequence[_Evaluated], of: Candidate | None = None) -> None:
        best = self._best(name, self.accepted[-1], evaluated, self.environment.expected_s, of=of)
        if best is not self.accepted[-1]:
            self.accepted.append(best)

    def _spend_memory(self) -> None:
        """Accepts the fastest of all evaluated, if it was rejected for memory that nobody else has a use for."""
        now, seconds = self.accepted[-1], self.environment.expected_s
        fitting = {
            place: each.candidate
            for place, each in enumerate(self.evaluated)
            if each.candidate and self.environment.fits(each.candidate)
        }
        place = min(fitting, key=lambda place: seconds(fitting[place]), default=None)
        if place is None or seconds(fitting[place]) > (1 - _WORTH_MEMORY) * seconds(now):
            return
        change = f"{_change(seconds, now, fitting[place])}, in memory that nothing else needs"
        self.records[place] = dataclasses.replace(self.records[place], accepted=True, reason=change)
        self.accepted.append(fitting[place])

    def _scheduled(self) -> Candidate:
        """Where communication stays exposed: compiled again, with XLA given the simulated times to schedule by.

        A schedule that hides more may need more memory: if it needs too much, XLA is held to the limit more strictly.
        If it fits but does not hide what it might, others are evaluated. Where a plan that was accepted before the last
        one may still be faster, or the best of those that were rejected, it is scheduled in the same way.
        """
        fits, last = self.environment.fits, self.accepted[-1]
        best = min(filter(fits, self.accepted), key=_step_s, default=last)
        if self.environment.platform != "cuda" or not last.waits:
            return best
        for candidate in self.accepted[: -_ROUNDS - 1 : -1]:
            expected_s = (1 + _MISSED) * self.environment.expected_s(candidate)
            if candidate is last or not fits(best) or expected_s < _step_s(best):
                best = self._better_scheduled(candidate, best)
        other = self._fastest_rejected()
        if other is None or (fits(best) and self.environment.expected_s(other) > (1 - _WORTH_ANOTHER) * _step_s(best)):
            return best
        return self._better_scheduled(other, best)

    def _fastest_rejected(self) -> Candidate | None:
        """Of what fits and was rejected the one that is expected to be fastest: what was rather taken may miss that."""
        before = {each.plan for each in self.accepted}
        evaluated = [each.candidate for each in self.evaluated if each.candidate is not None]
        rejected = [each for each in evaluated if each.plan not in before and not each.plan.latencies]
        return min(filter(self.environment.fits, rejected), key=self.environment.expected_s, default=None)

    def _better_scheduled(self, candidate: Candidate, best: Candidate) -> Candidate:
        """The better of ``best`` and ``candidate`` with XLA given the times to schedule it by."""
        fits, expected_s = self.environment.fits, (1 + _MISSED) * self.environment.expected_s(candidate)
        plan = candidate.plan.replace(latencies=scheduler_latencies(candidate.simulation))
        evaluated = [self._scheduled_by(plan, "scheduler latencies", candidate)]
        scheduled, strict = evaluated[0].candidate, plan.replace(options=strictly_limited(dict(plan.options)))
        if scheduled is not None and not fits(scheduled) and strict != plan:
            evaluated.append(self._scheduled_by(strict, "and held to the limit", candidate))
        elif scheduled is not None and fits(scheduled) and _step_s(scheduled) > expected_s:
            evaluated += self._otherwise_scheduled(plan, candidate)
        return self._best("schedule", best, evaluated, _step_s, is_last=True, of=candidate)

    def _otherwise_scheduled(self, plan: Plan, candidate: Candidate) -> list[_Evaluated]:
        """Other schedules of ``candidate``, where the latencies of ``plan`` made none that hides enough.

        With two collectives in flight at a time the network is not idle until compute comes to where the next one
        starts; simulated, they follow one another. With a little less said of each, all may find room in a loop that
        has just as much compute as communication.
        """
        options, simulation = dict(plan.options) | two_collectives(), candidate.simulation
        two = plan.replace(options=options, latencies=scheduler_latencies(simulation, at_a_time=2))
        less = plan.replace(latencies=scheduler_latencies(simulation, scale=_LESS))
        others = {"and two collectives at a time": two, "a little less of collectives": less}
        return results_of(partial(self._scheduled_by, other, said, candidate) for said, other in others.items())

    def _scheduled_by(self, plan: Plan, decision: str, candidate: Candidate) -> _Evaluated:
        lowered = candidate.evaluated.lowered
        return _Evaluated.of(decision, partial(compiled, candidate.program, lowered, plan, self.environment))

    def _closed(self, closing: Strategy, now: Candidate) -> Candidate:
        proposals = self._proposed(closing, now, "another schedule")
        evaluated = results_of(
            partial(_Evaluated.of, each.decision, partial(self._evaluate_scheduled, each.plan)) for each in proposals
        )
        return self._best(closing.name, now, evaluated, _step_s, is_last=True)

    def _steadied(self, best: Candidate) -> Candidate:
        """``best``, or the same scheduled as if collectives took longer, if that is worth more on other networks.

        Where communication takes longer than compute there is none to spare for that.
        """
        is_bound = best.prediction.communication_s >= best.prediction.compute_s
        if not best.plan.latencies or not self.environment.fits(best) or is_bound:
            return best
        at_a_time = 2 if two_collectives().items() <= dict(best.plan.options).items() else 1
        longer = scheduler_latencies(best.simulation, at_a_time, _LONGER)
        decision = f"as if collectives took {_LONGER:g} times as long"
        evaluated = self._scheduled_by(best.plan.replace(latencies=longer), decision, best)

        candidate = evaluated.candidate
        if candidate is None or _step_s(candidate) > (1 + _LOST) * _step_s(best):
            return self._best("schedule", best, [evaluated], _step_s, is_last=True)
        means = {each.plan: self._on_networks_s(each) for each in (best, candidate)}
        said = "on average of slower and faster networks"
        return self._best("schedule", best, [evaluated], lambda each: means[each.plan], is_last=True, said=said)

    def _on_networks_s(self, candidate: Candidate) -> float:
        """The step on average of the network as it is and of slower and faster ones."""
        costs = self.environment.costs
        others = [dataclasses.replace(costs, collectives_take=times) for times in _NETWORKS]
        return statistics.mean([_step_s(candidate), *(_step_s(candidate.simulated_by(each)) for each in others)])

    def _evaluate_scheduled(self, plan: Plan) -> Candidate:
        """``plan`` carried out, and scheduled by what that takes."""
        candidate = evaluate(self.base, plan.replace(latencies=()), self.environment)
        if self.environment.platform != "cuda" or not candidate.waits:
            return candidate
        plan = candidate.plan.replace(latencies=scheduler_latencies(candidate.simulation))
        return compiled(candidate.program, candidate.evaluated.lowered, plan, self.environment)

    def _proposed(self, strategy: Strategy, best: Candidate, what: str) -> list[Proposal]:
        """What ``strategy`` proposes; of ``what`` it cannot, a record."""
        try:
            return list(proposed(strategy, self.base, best, self.environment))
        except (errors.InvariantError, errors.PlanError) as error:
            failed = f"could not be proposed: {_first_line(error)}"
            self.evaluated.append(_Evaluated(what, None, 0.0, error))
            self._record(Record(strategy.name, what, best.prediction, None, False, failed, 0.0))
            return []

    def _all_evaluated(self, proposals: Sequence[Sequence[Proposal]]) -> list[list[_Evaluated]]:
        """What became of the ``proposals`` of each of several strategies.

        As many are evaluated at a time as there are cores: most of a candidate is one thread of XLA.
        """
        evaluated = iter(in_parallel([self._evaluated_or_less(each) for of_one in proposals for each in of_one]))
        return [[each for _ in of_one for each in next(evaluated)] for of_one in proposals]

    def _evaluated_or_less(self, proposal: Proposal | None) -> Iterator[_Evaluated]:
        """The proposal and, as long as they do not fit, the more modest ones."""
        while proposal is not None:
            each = _Evaluated.of(proposal.decision, partial(evaluate, self.base, proposal.plan, self.environment))
            yield each
            fits = each.candidate is not None and self.environment.fits(each.candidate)
            proposal = None if fits else proposal.otherwise

    def _best(
        self,
        name: str,
        now: Candidate,
        evaluated: Sequence[_Evaluated],
        seconds: Callable[[Candidate], float],
        is_last: bool = False,
        of: Candidate | None = None,
        said: str = "once scheduled",
    ) -> Candidate:
        """The best of ``now`` and what was ``evaluated`` by ``seconds``; keeps what became of each.

        Memory is spent for time, unless this ``is_last`` and nobody else has a use for it. What was evaluated changes
        ``now``, unless it says ``of`` what. Where ``seconds`` are not those of a candidate as it was compiled it is
        ``said`` what they are.
        """
        best, of = now, of or now

        def objection_to(candidate: Candidate) -> str:
            spent = 0.0 if is_last else self._spent(candidate, best)
            return self._objection(candidate, best, seconds, max(_LEAST_GAIN, spent * WORTH_TRYING), said)

        for each in evaluated:
            if each.candidate is not None and not objection_to(each.candidate):
                best = each.candidate
        self.evaluated += evaluated
        for each in evaluated:
            accepted, after = each.candidate is best, each.candidate and each.candidate.prediction
            if each.candidate is None:
                reason = f"could not be compiled: {_first_line(each.failure)}"
            else:
                reason = "" if accepted else objection_to(each.candidate)
                reason = reason or _change(seconds, of, each.candidate, said)
            brought = () if each.candidate is None else _brought(each.candidate.plan, of.plan)
            self._record(Record(name, each.decision, of.prediction, after, accepted, reason, each.wall_s, brought))
        return best

    def _record(self, record: Record) -> None:
        self.records.append(record)
        verdict = "accepted" if record.accepted else "rejected"
        self.progress.say(f"{record.strategy} {verdict}: {record.decision}: {record.reason}")

    def _spent(self, candidate: Candidate, best: Candidate) -> float:
        """The share of the memory that ``best`` leaves which ``candidate`` takes, from 0 to 1."""
        if self.environment.limit_bytes is None:
            return 0.0
        left_bytes = max(self.environment.limit_bytes - best.prediction.peak_bytes, 1)
        return min(max((candidate.prediction.peak_bytes - best.prediction.peak_bytes) / left_bytes, 0.0), 1.0)

    def _objection(
        self, candidate: Candidate, best: Candidate, seconds: Callable[[Candidate], float], least: float, said: str
    ) -> str:
        """Why ``candidate`` does not replace ``best``, of whose time it must save the share ``least``; or empty."""
        peak, limit, fits = candidate.prediction.peak_bytes, self.environment.limit_bytes, self.environment.fits
        on_host, host_limit = candidate.prediction.host_bytes, self.environment.host_bytes
        if not fits(candidate) and (fits(best) or peak >= best.prediction.peak_bytes):
            if limit is not None and peak > limit:
                return f"takes {_beyond(peak, limit)}"
            return f"takes {_beyond(on_host, host_limit)} of the host's memory"
        if not fits(best) or seconds(candidate) <= (1 - least) * seconds(best):
            return ""
        slower = seconds(candidate) > (1 - _LEAST_GAIN) * seconds(best)
        grounds = "no faster" if slower else f"for {errors.sized(peak)} hardly faster"
        against = f"{seconds(candidate):.4g} s against {seconds(best):.4g} s"
        is_promised = seconds(candidate) != _step_s(candidate) or seconds(best) != _step_s(best)
        return f"{grounds}: {against}{f' {said}' * is_promised}"


def _beyond(size_bytes: int, limit_bytes: int) -> str:
    return f"{errors.sized(size_bytes)}, {errors.sized(size_bytes - limit_bytes)} more than the limit"


def _that_led_to(prediction: Prediction, records: Iterable[Record]) -> list[Record]:
    """``records``, of which only those are accepted that the plan with this very ``prediction`` came of, in a chain.

    What was left for its memory, or another plan that XLA schedules better, is without decisions accepted since.
    """
    kept: list[Record] = []
    for record in reversed(list(records)):
        if record.after is prediction:
            prediction = record.before
            reason = record.reason if record.accepted else f"{record.reason}, but it came out faster"
            record = dataclasses.replace(record, accepted=True, reason=reason)
        elif record.accepted:
            reason = f"{record.reason}, but a plan without it came out faster"
            record = dataclasses.replace(record, accepted=False, reason=reason)
        kept.insert(0, record)
    return kept


def _brought(plan: Plan, before: Plan) -> tuple[str, ...]:
    known = before.lines()
    return tuple(line for line in plan.lines() if line not in known)


def _change(
    seconds: Callable[[Candidate], float], before: Candidate, after: Candidate, said: str = "once scheduled"
) -> str:
    """Steps as compiled, which follow from one another, and what they were compared by, if that is something else."""
    compared = f"{seconds(before):.4g} s to {seconds(after):.4g} s"
    compiled = f"{_step_s(before):.4g} s to {_step_s(after):.4g} s"
    return compiled if compared == compiled else f"{compiled} ({compared} {said})"


def _first_line(failure: Exception | None) -> str:
    return next(iter(str(failure).splitlines()), "")[:200]


def _step_s(candidate: Candidate) -> float:
    return candidate.prediction.step_s
