"""What a plan's, a planned program's and a planned step's summaries say of planning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_deepcompile.summary import cut, size_text

if TYPE_CHECKING:
    from jax_deepcompile.planner.plan import Plan, Prediction
    from jax_deepcompile.planner.session import Planned

Rows = tuple[tuple[str, str], ...]


def plan_rows(plan: Plan) -> Rows:
    """Decisions, the first of many, and what they came of."""
    decisions = [line for line in str(plan).splitlines() if not line.startswith(("option ", "schedule by "))]
    accepted = sum(record.accepted for record in plan.records)
    tried = f"{len(plan.records)} tried, {accepted} accepted; plan.records has them" if plan.records else ""
    told = [f"{len(plan.options)} options"] * bool(plan.options)
    told += [f"{len(plan.latencies)} latencies to schedule by"] * bool(plan.latencies)
    return (
        ("decisions", "\n".join(cut(decisions)) or "fully sharded, nothing more"),
        ("XLA is told", ", ".join(told)),
        ("candidates", tried),
    )


def expected_rows(prediction: Prediction | None, limit_bytes: int | None = None) -> Rows:
    """What the planned step is expected to take."""
    if prediction is None:
        return (("expected step", "not simulated"),)
    limit = "" if limit_bytes is None else f" of {size_text(limit_bytes)}"
    return (
        ("expected step", f"{prediction.step_s:.4g} s, simulated"),
        ("peak memory", f"{size_text(prediction.peak_bytes)} a device{limit}"),
    )


def planned_rows(planned: Planned | None) -> Rows:
    """Whether it is planned, and what is expected or measured."""
    if planned is None:
        return (("plan", "not planned yet"),)
    measured = "" if planned.measured is None else f"{planned.measured.seconds:.4g} s"
    return (
        ("plan", planned.origin),
        *expected_rows(planned.plan.prediction, planned.limit_bytes),
        ("measured step", measured),
    )
