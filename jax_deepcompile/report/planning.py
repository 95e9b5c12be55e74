"""What was decided, what each decision bought, and what was tried in vain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.planner.plan import Plan, Prediction, Record
from jax_deepcompile.planner.session import MEASURE, Planned
from jax_deepcompile.report.words import seconds_text
from jax_deepcompile.transforms.prefetch import Prefetch

_GIB = 1 << 30
_EACH = 8
"""So many gathers that start early have a line each."""
_REJECTED = 6
"""So many proposals that were rejected have."""
_NOTABLE = 0.02
"""The share of a step that is worth hiding."""


@dataclass(frozen=True)
class Change:
    """What was accepted: steps as compiled before and after it.

    Attributes:
      strategy: that proposed it.
      decision: in words.
      before_s, after_s: seconds a step.
      grounds: in brackets what it was compared by, where that is something else, such as a better schedule.
      decisions: of the plan, that are there since.
    """

    strategy: str
    decision: str
    before_s: float
    after_s: float
    grounds: str
    decisions: tuple[str, ...] = ()

    @property
    def gain(self) -> str:
        saved_s = self.before_s - self.after_s
        return f"saves {seconds_text(saved_s)}" if saved_s >= 0 else f"costs {seconds_text(-saved_s)}"

    def line(self) -> str:
        """What it bought.

        >>> Change("unshard", "keeps it", 2.0, 1.5, "").line()
        'unshard [accepted]: keeps it: 2 s to 1.5 s, saves 500 ms'
        """
        change = f"{self.before_s:.4g} s to {self.after_s:.4g} s, {self.gain}"
        return f"{self.strategy} [accepted]: {self.decision}: {change}" + f" {self.grounds}" * bool(self.grounds)


@dataclass(frozen=True)
class Rejected:
    """What was proposed and rejected, and why."""

    strategy: str
    decision: str
    reason: str


@dataclass(frozen=True)
class Decisions:
    """A plan, and how it came about.

    Attributes:
      origin: where it is from.
      decisions: by name, in order, and what XLA is told; gathers that start early are counted where they are many.
      first: those of them that none of ``changes`` brought.
      first_s: the step as divided, before any change; each of ``changes`` goes on from the one before.
      edited_s: from what to what, where the plan was edited since.
      candidates, planning_s: compiled and simulated, and seconds that took in sum.
      further: what it would take to be faster.
      measured_s: the step, measured; None if it was not.
      notes: what it was planned by.
    """

    origin: str
    decisions: tuple[str, ...]
    first: tuple[str, ...] = ()
    first_s: float | None = None
    changes: tuple[Change, ...] = ()
    edited_s: tuple[float, float] | None = None
    rejected: tuple[Rejected, ...] = ()
    candidates: int = 0
    planning_s: float = 0.0
    further: tuple[str, ...] = ()
    measured_s: float | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        lines = [f"plan: {self.origin}"]
        first = [f"    {line}" for line in self.first]
        if self.first_s is None:
            lines += [f"  {line}" for line in self.decisions]
        else:
            lines.append("steps simulated of XLA's schedule, from change to change, with the decisions of each:")
            lines.append(f"  as divided, before any change: {self.first_s:.4g} s")
            lines += first if self.edited_s is None else []
            for each in self.changes:
                lines += [f"  {each.line()}", *(f"    {line}" for line in each.decisions)]
        if self.edited_s is not None:
            before_s, after_s = self.edited_s
            lines += [f"  [given] the plan was edited since: {before_s:.4g} s to {after_s:.4g} s", *first]
        shown = self.rejected[:_REJECTED]
        lines += [f"  {each.strategy} [rejected]: {each.decision}: {each.reason}" for each in shown]
        if len(self.rejected) > len(shown):
            lines.append(f"  {len(self.rejected) - len(shown)} more were rejected; plan.records has them")
        if self.candidates:
            candidates = f"{self.candidates} candidate" + "s" * (self.candidates > 1)
            lines.append(
                f"planning: {candidates} compiled and simulated, some side by side, in {self.planning_s:.1f} s in sum"
            )
        lines += [f"to go further: {line}" for line in self.further]
        lines += [f"measured step: {self.measured_s:.4g} s"] if self.measured_s is not None else []
        return [*lines, *self.notes]


def decisions_of(planned: Planned | None) -> Decisions:
    """Of a program as it will run; None where it is not planned yet."""
    if planned is None:
        return Decisions("not planned yet", ())
    plan, expected = planned.plan, planned.plan.prediction
    accepted = [record for record in plan.records if record.accepted]
    rejected = [record for record in plan.records if not record.accepted]
    compiled = [record for record in plan.records if record.strategy != MEASURE]
    since = {line: place for place, record in enumerate(accepted) for line in record.brought}

    def said(place: int | None) -> tuple[str, ...]:
        return _counted(plan, [line for line in plan.lines() if since.get(line) == place])

    last = accepted[-1].after if accepted else plan.records[0].before if plan.records else None
    edited = last is not None and expected is not None and last != expected
    first_s = plan.undecided_s if plan.records else planned.before_s
    changes = [_change(record, said(place)) for place, record in enumerate(accepted)]
    if plan.decisions and not plan.records and first_s is not None and expected is not None:
        changes = [Change("plan", "as it was given", first_s, expected.step_s, "", said(None))]
    return Decisions(
        planned.origin,
        _counted(plan, plan.lines()) or (str(plan),),
        said(None) if plan.records else (),
        first_s,
        tuple(changes),
        (last.step_s, expected.step_s) if edited and last and expected else None,
        tuple(Rejected(each.strategy, each.decision, each.reason) for each in rejected),
        len(compiled),
        sum(record.wall_s for record in compiled),
        () if expected is None else tuple(_further(expected, plan.records, planned.limit_bytes)),
        None if planned.measured is None else planned.measured.seconds,
        () if planned.profile is None else tuple(_planned_by(planned.profile)),
    )


def _counted(plan: Plan, lines: Sequence[str]) -> tuple[str, ...]:
    """``lines`` of ``plan``, gathers that start early as their number where they are many."""
    early = [each.describe() for each in plan.of(Prefetch)]
    counted = [line for line in lines if line in early] if len(early) > _EACH else []
    said = f"{len(counted)} gathers start ahead of their use"
    return (*(line for line in lines if line not in counted), *[said] * bool(counted))


def _change(record: Record, decisions: tuple[str, ...]) -> Change:
    before_s = record.before.step_s
    after_s = before_s if record.after is None else record.after.step_s
    grounds = record.reason.removeprefix(f"{before_s:.4g} s to {after_s:.4g} s").lstrip(", ")
    grounds = grounds if not grounds or grounds.startswith("(") else f"({grounds})"
    return Change(record.strategy, record.decision, before_s, after_s, grounds, decisions)


def _planned_by(profile: Profile) -> Iterator[str]:
    """What was measured of the step the profile was taken of, and what was not."""
    if profile.step is not None:
        yield f"planned by a profile of a step of {profile.step.seconds:.4g} s"
    yield from (f"not measured, left to the tables: {line}" for line in profile.fallbacks())


def _further(expected: Prediction, records: Sequence[Record], limit_bytes: int | None) -> Iterator[str]:
    """What it would take to go further: more memory, less to send for what is computed, less to compute."""
    too_large = {_saves_s(each, limit_bytes): each for each in records}
    if (saved_s := max(too_large, default=0.0)) and (after := too_large[saved_s].after):
        decision = too_large[saved_s].decision
        yield f"{after.peak_bytes / _GIB:.2f} GiB a device would save about {saved_s:.3g} s ({decision})"
    if expected.communication_s > expected.compute_s:
        times = expected.communication_s / max(expected.compute_s, 1e-12)
        yield f"communication bounds the step, until the network is {times:.2f} times as fast or the batch as large"
    elif waits := _waits(expected):
        yield from waits
    else:
        share = 100 * expected.compute_s / expected.step_s if expected.step_s else 0.0
        yield f"compute bounds the step: kernels run {share:.1f} % of it"


def _waits(expected: Prediction) -> list[str]:
    """What compute waits for so long that it is worth saying."""
    waited = {
        "communication": expected.exposed_s,
        "copies between the device and its host": expected.exposed_copy_s,
    }
    return [
        f"compute waits {seconds:.4g} s, {100 * seconds / expected.step_s:.1f} % of the step, for {what}"
        for what, seconds in waited.items()
        if seconds > _NOTABLE * expected.step_s
    ]


def _saves_s(record: Record, limit_bytes: int | None) -> float:
    """Seconds that a candidate would save that takes too much memory."""
    if limit_bytes is None or record.after is None or record.after.peak_bytes <= limit_bytes:
        return 0.0
    return max(record.before.step_s - record.after.step_s, 0.0)
