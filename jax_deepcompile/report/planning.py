"""The planner's part of ``explain()``: what was evaluated, what was accepted, what it is expected to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.utilisation import Utilisation
from jax_deepcompile.planner.plan import Plan, Prediction, Record
from jax_deepcompile.planner.session import MEASURE, Planned
from jax_deepcompile.transforms.prefetch import Prefetch

_GIB = 1 << 30
_EACH = 8
"""So many gathers that start early have a line each."""
_REJECTED = 6
"""So many proposals that were rejected have."""


def explain_plan(planned: Planned, achieves: Utilisation | None = None) -> list[str]:
    """Lines for ``explain()``."""
    plan = planned.plan
    lines = [f"plan: {planned.origin}"]
    early = plan.of(Prefetch)
    if len(early) <= _EACH:
        lines += [f"  {line}" for line in str(plan).splitlines()]
    else:
        lines += [f"  {line}" for line in str(plan.having(Prefetch, ())).splitlines()]
        lines += [f"  {len(early)} gathers start ahead of their use"]
    lines += _how_it_came(plan)
    if plan.prediction is not None:
        lines += _expected(plan.prediction, planned.limit_bytes)
        lines += [achieves.describe(plan.prediction.step_s)] if achieves is not None else []
        lines += [f"to go further: {line}" for line in _further(plan.prediction, plan.records, planned.limit_bytes)]
    if planned.measured is not None:
        lines.append(f"measured step: {planned.measured.seconds:.4g} s")
    if planned.profile is not None:
        lines += _measured(planned.profile)
    return lines


def _how_it_came(plan: Plan) -> list[str]:
    """What was accepted, each on top of the last, so that gains add up; then what was rejected, and what all took."""
    if not plan.records:
        return []
    accepted = [record for record in plan.records if record.accepted]
    rejected = [record for record in plan.records if not record.accepted]
    first = accepted[0].before if accepted else rejected[0].before
    last = accepted[-1].after if accepted else first
    lines = [
        "steps simulated of XLA's schedule, from change to change:",
        f"  as divided, before any change: {first.step_s:.4g} s",
        *map(_accepted, accepted),
    ]
    if last is not None and plan.prediction is not None and last != plan.prediction:
        lines.append(f"  [given] the plan was edited since: {last.step_s:.4g} s to {plan.prediction.step_s:.4g} s")
    lines += [f"  {each.strategy} [rejected]: {each.decision}: {each.reason}" for each in rejected[:_REJECTED]]
    if len(rejected) > _REJECTED:
        lines.append(f"  {len(rejected) - _REJECTED} more were rejected; plan.records has them")
    compiled = [record for record in plan.records if record.strategy != MEASURE]
    spent_s = sum(record.wall_s for record in compiled)
    candidates = f"{len(compiled)} candidate" + "s" * (len(compiled) > 1)
    return [*lines, f"planning: {candidates} compiled and simulated, some side by side, in {spent_s:.1f} s in sum"]


def _accepted(record: Record) -> str:
    """A step as compiled before and after; what it was compared by, such as a better schedule, beside it."""
    after_s = record.before.step_s if record.after is None else record.after.step_s
    change = f"{record.before.step_s:.4g} s to {after_s:.4g} s"
    grounds = record.reason.removeprefix(change).lstrip(", ")
    return f"  {record.strategy} [accepted]: {record.decision}: {change}" + f" ({grounds})" * bool(grounds)


def _measured(profile: Profile) -> list[str]:
    """What was measured of the step the profile was taken of, and what was not."""
    lines = []
    if profile.step is not None:
        lines.append(f"planned by a profile of a step of {profile.step.seconds:.4g} s")
    return [*lines, *(f"not measured, left to the tables: {line}" for line in profile.fallbacks())]


def _expected(expected: Prediction, limit_bytes: int | None) -> list[str]:
    bound_s = expected.bound_s or max(expected.compute_s, expected.communication_s)
    over = f"{100 * (expected.step_s / bound_s - 1):.1f} % above its bound" if bound_s else "nothing to do"
    lines = [
        f"expected step: {expected.step_s:.4g} s, simulated: {over} "
        f"(compute {expected.compute_s:.4g} s, communication {expected.communication_s:.4g} s, "
        f"of which {expected.exposed_s:.4g} s exposed)"
    ]
    if expected.rematerialized_s:
        share = 100 * expected.rematerialized_s / expected.step_s
        lines.append(
            f"XLA's own rematerialisation pass repeats kernels to save memory: {expected.rematerialized_s:.4g} s, "
            f"{share:.1f} % of the step; a lower memory_limit lets the plan choose instead"
        )
    peak = f"peak memory: {expected.peak_bytes / _GIB:.2f} GiB a device"
    if limit_bytes is not None:
        peak += f" of {limit_bytes / _GIB:.2f} GiB"
    lines.append(peak)
    if expected.host_bytes:
        copies = f"copies {expected.copy_s:.4g} s, of which {expected.exposed_copy_s:.4g} s exposed"
        lines.append(f"host memory: {expected.host_bytes / _GIB:.2f} GiB for each device ({copies})")
    return lines


def _further(expected: Prediction, records: Sequence[Record], limit_bytes: int | None) -> Iterator[str]:
    """What it would take to go further: more memory, less to send for what is computed, less to compute."""
    too_large = {_saves_s(each, limit_bytes): each for each in records}
    if (saved_s := max(too_large, default=0.0)) and (after := too_large[saved_s].after):
        decision = too_large[saved_s].decision
        yield f"{after.peak_bytes / _GIB:.2f} GiB a device would save about {saved_s:.3g} s ({decision})"
    if expected.communication_s > expected.compute_s:
        times = expected.communication_s / max(expected.compute_s, 1e-12)
        yield f"communication bounds the step, until the network is {times:.2f} times as fast or the batch as large"
    elif expected.exposed_s > _NOTABLE * expected.step_s:
        share = 100 * expected.exposed_s / expected.step_s
        yield f"compute waits {expected.exposed_s:.4g} s, {share:.1f} % of the step, for communication"
    else:
        share = 100 * expected.compute_s / expected.step_s if expected.step_s else 0.0
        yield f"compute bounds the step: kernels run {share:.1f} % of it"


_NOTABLE = 0.02
"""The share of a step that is worth hiding."""


def _saves_s(record: Record, limit_bytes: int | None) -> float:
    """Seconds that a candidate would save that takes too much memory."""
    if limit_bytes is None or record.after is None or record.after.peak_bytes <= limit_bytes:
        return 0.0
    return max(record.before.step_s - record.after.step_s, 0.0)
