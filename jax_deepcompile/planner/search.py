"""The search: proposals are evaluated in turn, and the best that fits and gains is accepted. It knows no strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from jax_deepcompile import errors
from jax_deepcompile.costs.devices import to_pin
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment, evaluate
from jax_deepcompile.planner.journal import Evaluated, Journal, Yardstick, step_s
from jax_deepcompile.planner.limits import largest_temporaries
from jax_deepcompile.planner.other_networks import best_on_average, bounds_elsewhere, other_networks
from jax_deepcompile.planner.plan import Plan, Record
from jax_deepcompile.planner.schedule import Schedules
from jax_deepcompile.planner.state_on_host import unread_bytes
from jax_deepcompile.planner.strategy import Proposal, Stage, Strategy
from jax_deepcompile.runtime.parallel import in_parallel
from jax_deepcompile.runtime.progress import Progress

_ROUNDS = 3
"""How often a strategy that gained is asked again, now that the truth about its last proposal is known."""

_WORTH_ANOTHER = 0.01
"""The share of a step that it must have gained for that."""

_WORTH_MEMORY = WORTH_TRYING / 2
"""The share of a step that there must be to gain for memory to be spent that nothing else needs."""

_RIVALS = 2
"""Plans that may be run beside the best one."""

_ANY_BYTES = 1 << 62
"""More than any host has."""


def search(base: Program, environment: Environment, strategies: Sequence[Strategy], start: Plan) -> Candidate:
    """The best plan found: each strategy's proposals are evaluated, and the best that fits and gains is accepted.

    Raises:
      MemoryExceededError: not even ``start`` fits the limit.
    """
    with sharing_kernels(environment) as shared, Progress(f"planning {base.name}") as progress:
        return _Search(base, shared, Journal(shared, progress)).run(strategies, start)


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
    other: Candidate | None = None,
) -> Candidate:
    """``candidate``, its plan with its prediction and how it came about.

    Args:
      other: what fits the device with more of the host's memory.
    """
    limit, peak, on_host = environment.limit_bytes, candidate.prediction.peak_bytes, candidate.prediction.host_bytes
    if limit is not None and peak > limit:
        largest = largest_temporaries(candidate.evaluated.module, candidate.simulation.memory)
        arguments, host_bytes = candidate.evaluated.argument_bytes, other.prediction.host_bytes if other else 0
        host = host_bytes, environment.host_bytes, to_pin(environment.mesh, host_bytes)
        unread = unread_bytes(candidate.program)
        raise errors.MemoryExceededError(
            candidate.program.name, peak, limit, arguments, largest, *host, unread_bytes=unread
        )
    if on_host > environment.host_bytes:
        pinned = to_pin(environment.mesh, on_host)
        raise errors.HostMemoryExceededError(candidate.program.name, on_host, environment.host_bytes, pinned)
    plan = candidate.plan.replace(prediction=candidate.prediction, records=tuple(records))
    return dataclasses.replace(candidate, plan=plan)


@dataclass
class _Search:
    """One search, and what came of it so far.

    Attributes:
      environment: what it is for; its costs are calibrated by the first program that is compiled.
    """

    base: Program
    environment: Environment
    journal: Journal
    accepted: list[Candidate] = field(default_factory=list)

    def run(self, strategies: Sequence[Strategy], start: Plan) -> Candidate:
        opening, main, closing = ([each for each in strategies if each.stage is stage] for stage in Stage)
        self._open(opening, start)
        known = {start, *(each.plan for each in self.journal.candidates)}
        for strategy in main:
            self._improve(strategy, known)
        self._spend_memory()
        schedules = Schedules(self.base, self.environment, self.journal)
        best = schedules.best(self.accepted)
        best = self._elsewhere(main, known, schedules, best)
        for strategy in closing:
            best = schedules.closed(strategy.name, self._proposed(strategy, best, "another schedule"), best)
        best = schedules.steadied(best)
        other = None
        if not self.environment.fits(best):
            best, other = self._with_any_host(main, best)
            best = schedules.best([*self.accepted, best]) if best is other else best
        records = self.journal.that_led_to(best.prediction)
        found = _fitting(best, self.environment, records, other)
        way = (("", self.accepted[0].simulation), *self.journal.simulations(records))
        return dataclasses.replace(found, rivals=self._rivals(best), way=way)

    def _elsewhere(
        self, strategies: Sequence[Strategy], known: set[Plan], schedules: Schedules, best: Candidate
    ) -> Candidate:
        """``best``, or what slower and faster networks gain by where those matter, in memory that is left.

        Args:
          known: plans that are not evaluated again.
        """
        if not self.environment.fits(best) or not best.plan.latencies or not bounds_elsewhere(best):
            return best
        now = before = self._unscheduled(best)
        for there in other_networks(self.environment):
            start = now.simulated_by(there.costs)
            for strategy in strategies:
                proposals = self._proposed(strategy, start, "a change for other networks", there)
                proposals = [each for each in proposals if each.plan not in known]
                known |= {each.plan for each in proposals}
                (evaluated,) = self._all_evaluated([proposals])
                compared = self.environment, self.journal, strategy.name, now, evaluated, self._by
                after = best_on_average(*compared, least=before)
                if after is not now:
                    now, start = after, after.simulated_by(there.costs)
        return best if now is before else schedules.elsewhere(now, best)

    def _unscheduled(self, best: Candidate) -> Candidate:
        """What ``best`` is a schedule of."""
        before = next(record.before for record in self.journal.records if record.after is best.prediction)
        others = [self.accepted[0], *self.journal.candidates]
        return next(each for each in others if each.prediction is before)

    def _with_any_host(self, strategies: Sequence[Strategy], best: Candidate) -> tuple[Candidate, Candidate | None]:
        """The best where ``best`` does not fit, and what fits the device whatever it takes of its host, if anything."""
        if self.environment.platform != "cuda":
            return best, None
        larger, start = self.environment.replace(host_bytes=_ANY_BYTES), best
        known = {each.plan for each in self.journal.candidates}
        for strategy in strategies:
            for proposal in self._proposed(strategy, start, "what takes more of the host", larger):
                for each in self._evaluated_or_less(proposal) if proposal.plan not in known else ():
                    found = each.candidate
                    if found is not None and found.prediction.host_bytes <= self.environment.host_bytes:
                        best = self.journal.best(strategy.name, best, [each], self._by, of=start)
                    if found is not None and larger.fits(found):
                        return best, found
        return best, None

    def _rivals(self, best: Candidate) -> tuple[Plan, ...]:
        """The plans that simulate fastest after ``best``, of those that fit."""
        fitting = filter(self.environment.fits, [self.accepted[0], *self.journal.candidates])
        others = {each.plan: each for each in fitting if each.plan != best.plan}
        fastest = sorted(others.values(), key=step_s)[:_RIVALS]
        return tuple(each.plan.replace(prediction=each.prediction) for each in fastest)

    @property
    def _by(self) -> Yardstick:
        return Yardstick(self.environment.expected_s, counts_memory=True)

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

    def _accept(self, name: str, evaluated: Sequence[Evaluated], of: Candidate | None = None) -> None:
        best = self.journal.best(name, self.accepted[-1], evaluated, self._by, of)
        if best is not self.accepted[-1]:
            self.accepted.append(best)

    def _spend_memory(self) -> None:
        """Accepts the fastest of all evaluated, if it was rejected for memory that nobody else has a use for."""
        now, seconds = self.accepted[-1], self.environment.expected_s
        fastest = min(self.journal.fitting, key=seconds, default=None)
        if fastest is None or seconds(fastest) > (1 - _WORTH_MEMORY) * seconds(now):
            return
        self.journal.accept_after_all(fastest, f"{self._by.change(now, fastest)}, in memory that nothing else needs")
        self.accepted.append(fastest)

    def _proposed(
        self, strategy: Strategy, best: Candidate, what: str, environment: Environment | None = None
    ) -> Iterator[Proposal]:
        """What ``strategy`` proposes, here or for another ``environment``; of ``what`` it cannot, a record."""
        try:
            yield from proposed(strategy, self.base, best, environment or self.environment)
        except (errors.InvariantError, errors.PlanError) as error:
            self.journal.not_proposed(strategy.name, what, best, error)

    def _all_evaluated(self, proposals: Sequence[Sequence[Proposal]]) -> list[list[Evaluated]]:
        """What became of the ``proposals`` of each of several strategies.

        As many are evaluated at a time as there are cores: most of a candidate is one thread of XLA.
        """
        evaluated = iter(in_parallel([self._evaluated_or_less(each) for of_one in proposals for each in of_one]))
        return [[each for _ in of_one for each in next(evaluated)] for of_one in proposals]

    def _evaluated_or_less(self, proposal: Proposal | None) -> Iterator[Evaluated]:
        """The proposal and, as long as they do not fit, the more modest ones."""
        while proposal is not None:
            each = Evaluated.of(proposal.decision, partial(evaluate, self.base, proposal.plan, self.environment))
            yield each
            fits = each.candidate is not None and self.environment.fits(each.candidate)
            proposal = None if fits else proposal.otherwise
