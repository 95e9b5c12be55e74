"""The planner's part of ``explain()``: what was tried, what was taken, what it is expected to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.planning.plan import Prediction, Record
from jax_deepcompile.planning.session import Planned

_GIB = 1 << 30
_EACH = 8
"""So many gathers that start early have a line each."""
_LEFT = 6
"""So many proposals that were not taken have."""


def explain_plan(planned: Planned) -> list[str]:
    """Lines for ``explain()``."""
    plan = planned.plan
    lines = [f"plan: {planned.origin}"]
    if len(plan.prefetches) <= _EACH:
        lines += [f"  {line}" for line in str(plan).splitlines()]
    else:
        lines += [f"  {line}" for line in str(plan.replace(prefetches=())).splitlines()]
        lines += [f"  {len(plan.prefetches)} gathers start ahead of their use"]
    left = [record for record in plan.records if not record.taken]
    shown = [record for record in plan.records if record.taken or record in left[:_LEFT]]
    for record in shown:
        verdict = "taken" if record.taken else "left"
        lines.append(f"  {record.pass_name} [{verdict}, {record.wall_s:.1f} s]: {record.decision}: {record.reason}")
    if len(left) > _LEFT:
        lines.append(f"  {len(left) - _LEFT} more were left; plan.records has them")
    if plan.prediction is not None:
        lines += _expected(plan.prediction, planned.limit_bytes)
        lines += [f"to go further: {line}" for line in _further(plan.prediction, plan.records, planned.limit_bytes)]
    if planned.measured is not None:
        lines.append(f"measured step: {planned.measured.seconds:.4g} s")
    if planned.profile is not None:
        lines += _measured(planned.profile)
    return lines


def _measured(profile: Profile) -> list[str]:
    """What was measured of the step the profile was taken of, and what was not."""
    lines = []
    if profile.step is not None:
        lines.append(f"planned by a profile of a step of {profile.step.seconds:.4g} s")
    return [*lines, *(f"not measured, left to the tables: {line}" for line in profile.fallbacks())]


def _expected(expected: Prediction, limit_bytes: int | None) -> list[str]:
    bound_s = max(expected.compute_s, expected.communication_s, expected.bound_s)
    over = f"{100 * (expected.step_s / bound_s - 1):.1f} % above its bound" if bound_s else "nothing to do"
    lines = [
        f"expected step: {expected.step_s:.4g} s, {over} "
        f"(compute {expected.compute_s:.4g} s, communication {expected.communication_s:.4g} s, "
        f"of which {expected.exposed_s:.4g} s exposed)"
    ]
    peak = f"peak memory: {expected.peak_bytes / _GIB:.2f} GiB a device"
    if limit_bytes is not None:
        peak += f" of {limit_bytes / _GIB:.2f} GiB"
    return [*lines, peak]


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
    """Seconds that were left because a trial took too much memory."""
    if limit_bytes is None or record.after is None or record.after.peak_bytes <= limit_bytes:
        return 0.0
    return max(record.before.step_s - record.after.step_s, 0.0)
