"""The planner's part of ``explain()``: what was tried, what was taken, what it is expected to take."""

from __future__ import annotations

from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.planning.plan import Prediction
from jax_deepcompile.planning.session import Planned

_GIB = 1 << 30


def explain_plan(planned: Planned) -> list[str]:
    """Lines for ``explain()``."""
    plan = planned.plan
    lines = [f"plan: {planned.origin}"]
    lines += [f"  {line}" for line in str(plan).splitlines()]
    for record in plan.records:
        verdict = "taken" if record.taken else "left"
        lines.append(f"  {record.pass_name} [{verdict}, {record.wall_s:.1f} s]: {record.decision}: {record.reason}")
    if plan.prediction is not None:
        lines += _expected(plan.prediction, planned.limit_bytes)
    if planned.profile is not None:
        lines += _measured(planned.profile)
    return lines


def _measured(profile: Profile) -> list[str]:
    """What was measured of the step the profile was taken of, and what was not."""
    lines = []
    if profile.step is not None:
        lines.append(f"measured step: {profile.step.seconds:.4g} s, of the step that the profile was taken of")
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
    return [*lines, peak, *_further(expected, limit_bytes)]


def _further(expected: Prediction, limit_bytes: int | None) -> list[str]:
    """What it would take to go further."""
    if expected.communication_s > expected.compute_s:
        return ["to go further: communication bounds the step; more memory would keep more gathered, or a larger batch"]
    if expected.exposed_s > 0.02 * expected.step_s:
        return [f"to go further: {expected.exposed_s:.4g} s of communication are still exposed"]
    return ["to go further: compute bounds the step"]
