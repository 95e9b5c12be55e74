"""What became of all that was evaluated: candidates are compared, the best is accepted, each has a record of why."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.plan import Plan, Prediction, Record
from jax_deepcompile.runtime.progress import Progress

_LEAST_GAIN = 0.001
"""The share of a step that a change must save to be accepted: for less no plan is made longer."""


@dataclass(frozen=True)
class Evaluated:
    """What became of a decision that was evaluated: its candidate, or why it failed."""

    decision: str
    candidate: Candidate | None
    wall_s: float
    failure: Exception | None = None

    @classmethod
    def of(cls, decision: str, evaluated: Callable[[], Candidate]) -> Evaluated:
        began = time.perf_counter()
        try:
            candidate, failure = evaluated(), None
        except (RuntimeError, errors.InvariantError, errors.PlanError) as error:  # XLA's checks raise it plain
            candidate, failure = None, error
        return cls(decision, candidate, time.perf_counter() - began, failure)

    def simulated_by(self, costs: CostModel) -> Evaluated:
        return dataclasses.replace(self, candidate=self.candidate and self.candidate.simulated_by(costs))


@dataclass(frozen=True)
class Yardstick:
    """What candidates are compared by.

    Attributes:
      seconds: of a candidate.
      said: what these are, where they are not those of the step as it was compiled.
      counts_memory: whether memory is spent for time only, as what comes later may have a use for it.
    """

    seconds: Callable[[Candidate], float]
    said: str = "once scheduled"
    counts_memory: bool = False

    def change(self, before: Candidate, after: Candidate) -> str:
        """Steps as compiled, which follow from one another, and what they were compared by, if that is not the same."""
        compared = f"{self.seconds(before):.4g} s to {self.seconds(after):.4g} s"
        compiled = f"{step_s(before):.4g} s to {step_s(after):.4g} s"
        return compiled if compared == compiled else f"{compiled} ({compared} {self.said})"


def step_s(candidate: Candidate) -> float:
    return candidate.prediction.step_s


AS_COMPILED = Yardstick(step_s)
"""The step as it is, with all the memory that there is: for what is decided last."""


@dataclass
class Journal:
    """What was evaluated so far for the limits of ``environment``, and a record of each."""

    environment: Environment
    progress: Progress
    evaluated: list[Evaluated] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def candidates(self) -> list[Candidate]:
        return [each.candidate for each in self.evaluated if each.candidate is not None]

    @property
    def fitting(self) -> list[Candidate]:
        return list(filter(self.environment.fits, self.candidates))

    def best(
        self,
        name: str,
        now: Candidate,
        evaluated: Sequence[Evaluated],
        by: Yardstick,
        of: Candidate | None = None,
    ) -> Candidate:
        """The best of ``now`` and what the strategy ``name`` had ``evaluated``; what became of each is kept.

        Args:
          of: what they change, if not ``now``.
        """
        best, of = now, of or now
        for each in evaluated:
            if each.candidate is not None and not self._objection(each.candidate, best, by):
                best = each.candidate
        self.evaluated += evaluated
        for each in evaluated:
            accepted, after = each.candidate is best, each.candidate and each.candidate.prediction
            if each.candidate is None:
                reason = f"could not be compiled: {_first_line(each.failure)}"
            else:
                reason = "" if accepted else self._objection(each.candidate, best, by)
                reason = reason or by.change(of, each.candidate)
            brought = () if each.candidate is None else _brought(each.candidate.plan, of.plan)
            self._record(Record(name, each.decision, of.prediction, after, accepted, reason, each.wall_s, brought))
        return best

    def not_proposed(self, name: str, what: str, best: Candidate, error: Exception) -> None:
        """Keeps that the strategy ``name`` could not propose ``what``."""
        reason = f"could not be proposed: {_first_line(error)}"
        self.evaluated.append(Evaluated(what, None, 0.0, error))
        self._record(Record(name, what, best.prediction, None, False, reason, 0.0))

    def accept_after_all(self, candidate: Candidate, reason: str) -> None:
        """Has the record of what was rejected say that it was accepted."""
        place = next(place for place, each in enumerate(self.evaluated) if each.candidate is candidate)
        self.records[place] = dataclasses.replace(self.records[place], accepted=True, reason=reason)

    def that_led_to(self, prediction: Prediction) -> list[Record]:
        """The records; accepted are only those, in a chain, that the plan with this very ``prediction`` came of.

        What was left for its memory, or another plan that XLA schedules better, is without decisions accepted since.
        """
        kept: list[Record] = []
        for record in reversed(self.records):
            if record.after is prediction:
                prediction = record.before
                reason = record.reason if record.accepted else f"{record.reason}, but it came out faster"
                record = dataclasses.replace(record, accepted=True, reason=reason)
            elif record.accepted:
                reason = f"{record.reason}, but a plan without it came out better"
                record = dataclasses.replace(record, accepted=False, reason=reason)
            kept.insert(0, record)
        return kept

    def simulations(self, records: Sequence[Record]) -> Iterator[tuple[str, Simulation]]:
        """The step after each of ``records``, of all that was evaluated, that was accepted, by what proposed it."""
        for record, each in zip(records, self.evaluated, strict=True):
            if record.accepted and each.candidate is not None:
                yield record.strategy, each.candidate.simulation

    def _record(self, record: Record) -> None:
        self.records.append(record)
        verdict = "accepted" if record.accepted else "rejected"
        self.progress.say(f"{record.strategy} {verdict}: {record.decision}: {record.reason}")

    def _objection(self, candidate: Candidate, best: Candidate, by: Yardstick) -> str:
        """Why ``candidate`` does not replace ``best``; or empty."""
        peak, limit, fits = candidate.prediction.peak_bytes, self.environment.limit_bytes, self.environment.fits
        on_host, host_limit = candidate.prediction.host_bytes, self.environment.host_bytes
        if not fits(candidate) and (fits(best) or peak >= best.prediction.peak_bytes):
            if limit is not None and peak > limit:
                return f"takes {_beyond(peak, limit)}"
            return f"takes {_beyond(on_host, host_limit)} of the host's memory"
        spent = self._spent(candidate, best) if by.counts_memory else 0.0
        least = max(_LEAST_GAIN, spent * WORTH_TRYING)
        if not fits(best) or by.seconds(candidate) <= (1 - least) * by.seconds(best):
            return ""
        gains = by.seconds(candidate) <= (1 - _LEAST_GAIN) * by.seconds(best)
        grounds = f"for {errors.sized(peak)} hardly faster" if gains else "hardly faster"
        grounds = grounds if by.seconds(candidate) < by.seconds(best) else "no faster"
        now, before = (f"{by.seconds(each):.4g} s" for each in (candidate, best))
        against = f"{now} as before" if now == before else f"{now} against {before}"
        is_compiled = by.seconds(candidate) == step_s(candidate) and by.seconds(best) == step_s(best)
        return f"{grounds}: {against}" if is_compiled else f"{grounds}: {against} {by.said}"

    def _spent(self, candidate: Candidate, best: Candidate) -> float:
        """The share of the memory that ``best`` leaves which ``candidate`` takes, from 0 to 1."""
        if self.environment.limit_bytes is None:
            return 0.0
        left_bytes = max(self.environment.limit_bytes - best.prediction.peak_bytes, 1)
        return min(max((candidate.prediction.peak_bytes - best.prediction.peak_bytes) / left_bytes, 0.0), 1.0)


def _beyond(size_bytes: int, limit_bytes: int) -> str:
    return f"{errors.sized(size_bytes)}, {errors.sized(size_bytes - limit_bytes)} more than the limit"


def _brought(plan: Plan, before: Plan) -> tuple[str, ...]:
    known = before.lines()
    return tuple(line for line in plan.lines() if line not in known)


def _first_line(failure: Exception | None) -> str:
    return next(iter(str(failure).splitlines()), "")[:200]
