"""What ``explain()`` says of planning."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jax_deepcompile.lowering.xla_options import DOUBLE_BUFFERING, GATHER_COMBINER
from jax_deepcompile.planner.plan import Plan, Prediction, Record
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.peak import PeakMemory
from jax_deepcompile.report.planning import decisions_of
from jax_deepcompile.report.seconds import seconds_of
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.prefetch import Prefetch

pytestmark = pytest.mark.pure

ANYTHING: Any = None
GIB = 1 << 30


def explained(plan: Plan, limit_bytes: int | None = None) -> list[str]:
    return decisions_of(Planned(plan, ANYTHING, limit_bytes=limit_bytes, origin="given")).lines()


def test_many_gathers_that_start_early_take_one_line():
    few, many = ([Prefetch(f"layer{number}", "mlp dot_general") for number in range(count)] for count in (8, 9))
    assert "\n".join(explained(Plan("0").having(Prefetch, few))).count("starts after mlp dot_general") == 8
    lines = explained(Plan("0").having(Prefetch, many))
    assert "  9 gathers start ahead of their use" in lines
    assert not any("starts after" in line for line in lines)


@pytest.mark.parametrize(
    ("prediction", "line"),
    [
        (
            Prediction(2.0, 1.0, 1.5, 1.0, GIB),
            "communication bounds the step, until the network is 1.50 times as fast or",
        ),
        (Prediction(2.0, 1.5, 1.0, 0.5, GIB), "compute waits 0.5 s, 25.0 % of the step, for communication"),
        (
            Prediction(2.0, 1.5, 0.0, 0.0, GIB, exposed_copy_s=0.5),
            "compute waits 0.5 s, 25.0 % of the step, for copies between the device and its host",
        ),
        (Prediction(2.0, 1.98, 1.0, 0.02, GIB), "compute bounds the step: kernels run 99.0 % of it"),
        (Prediction(0.0, 0.0, 0.0, 0.0, 0), "compute bounds the step: kernels run 0.0 % of it"),
    ],
)
def test_what_bounds_the_step(prediction: Prediction, line: str):
    last = explained(Plan("0", prediction=prediction))[-1]
    assert last.startswith(f"to go further: {line}")


def test_what_xla_rematerialised_by_itself_is_said():
    memory = PeakMemory(GIB, None, rematerialized_s=0.1, step_s=2.0)
    line = "  XLA's own rematerialisation pass repeats kernels to save memory: 100 ms, 5.0% of the step"
    assert any(each.startswith(line) for each in memory.lines())
    without = dataclasses.replace(memory, rematerialized_s=0.0)
    assert not any("rematerialisation" in each for each in without.lines())


def test_of_a_plan_from_elsewhere_the_prediction_is_told_and_what_is_unknown():
    prediction = Prediction(2.0, 1.5, 1.0, 0.25, GIB, copy_s=1.0, exposed_copy_s=0.25)
    told = seconds_of(Planned(Plan("0", prediction=prediction), ANYTHING, origin="given"), None)
    assert sum(part.seconds for part in told.parts) == told.step_s == 2.0
    assert (told.kernels, told.waits) == ((), ())
    assert "the plan was not made in this run" in told.unknown
    assert seconds_of(Planned(Plan("0"), ANYTHING, origin="given"), None).step_s is None


def record(decision: str, step_s: float, peak_bytes: int) -> Record:
    before, after = (Prediction(seconds, 1.0, 1.0, 0.5, size) for seconds, size in ((2.0, GIB), (step_s, peak_bytes)))
    return Record("unshard", decision, before, after, False, "takes too much", 1.0)


def test_what_more_memory_would_save():
    tried = (
        record("some", 1.75, 5 * GIB),
        record("most", 1.5, 6 * GIB),
        record("slower", 2.5, 7 * GIB),
        record("small", 1.0, GIB),
        Record("unshard", "broken", tried_before := Prediction(2.0, 1.0, 1.0, 0.5, GIB), None, False, "no", 1.0),
    )
    lines = explained(Plan("0", prediction=tried_before, records=tried), 4 * GIB)
    assert "to go further: 6.00 GiB a device would save about 0.5 s (most)" in lines
    assert sum("would save" in line for line in lines) == 1
    assert not any(
        "would save" in line for line in explained(Plan("0", prediction=tried_before, records=tried[2:]), GIB)
    )
    assert not any("would save" in line for line in explained(Plan("0", prediction=tried_before, records=tried)))


def test_what_was_accepted_is_all_told_and_what_was_rejected_in_part():
    tried = [record(f"try {number}", 2.5, GIB) for number in range(9)]
    tried.append(dataclasses.replace(record("the best", 1.0, GIB), accepted=True))
    lines = explained(Plan("0", records=tuple(tried)))
    assert sum(" [rejected]: " in line for line in lines) == 6
    assert "  unshard [accepted]: the best: 2 s to 1 s, saves 1 s (takes too much)" in lines
    assert "  3 more were rejected; plan.records has them" in lines
    assert "planning: 10 candidates compiled and simulated, some side by side, in 10.0 s in sum" in lines


def test_gains_add_up_to_the_expected_step_and_promises_stand_beside_them():
    """As of Llama-3-70B: what was judged by was 2.273 s to 1.911 s, and then 2.026 s to 1.907 s."""
    steps = [Prediction(seconds, 1.0, 1.0, 0.5, GIB) for seconds in (2.617, 2.306, 2.026, 1.907)]
    reasons = (
        "2.617 s to 2.306 s (2.617 s to 2.273 s once scheduled)",
        "2.306 s to 2.026 s (2.273 s to 1.911 s once scheduled)",
        "2.026 s to 1.907 s",
    )
    names = ("pipeline_loops", "keep_activations", "schedule")
    kept, again, option = "microbatches: gathers w once", "microbatches: gathers v once", "option {} = True"
    brought = ((kept, again), (kept, "what is not there in the end"), (option.format(DOUBLE_BUFFERING),))
    records = tuple(
        Record(name, "so", before, after, True, reason, 1.0, lines)
        for name, before, after, reason, lines in zip(names, steps, steps[1:], reasons, brought, strict=False)
    )
    decisions = (KeptGathers("microbatches", ("w",)), KeptGathers("microbatches", ("v",)))
    plan = Plan("0", decisions, ((DOUBLE_BUFFERING, True), (GATHER_COMBINER, 1)), (), steps[-1], records)
    lines = explained(plan)
    start = lines.index("steps simulated of XLA's schedule, from change to change, with the decisions of each:")
    first = f"    option {GATHER_COMBINER} = 1"
    assert lines[start + 1 : start + 10] == [
        "  as divided, before any change: 2.617 s",
        first,
        "  pipeline_loops [accepted]: so: 2.617 s to 2.306 s, saves 311 ms (2.617 s to 2.273 s once scheduled)",
        f"    {again}",
        "  keep_activations [accepted]: so: 2.306 s to 2.026 s, saves 280 ms (2.273 s to 1.911 s once scheduled)",
        f"    {kept}",
        "  schedule [accepted]: so: 2.026 s to 1.907 s, saves 119 ms",
        f"    {option.format(DOUBLE_BUFFERING)}",
        "planning: 3 candidates compiled and simulated, some side by side, in 3.0 s in sum",
    ]
    assert not any("edited since" in line for line in lines)
    edited = explained(plan.replace(prediction=steps[0]))
    place = edited.index("  [given] the plan was edited since: 1.907 s to 2.617 s")
    assert (edited[place + 1], edited.count(first)) == (first, 1)


def test_where_nothing_was_tried_nothing_is_told_of_it():
    assert not any("simulated" in line or "planning:" in line for line in explained(Plan("0")))
