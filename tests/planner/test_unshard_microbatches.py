"""Layers written one by one, under gradient accumulation: gathered once where memory holds them, most worth first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_deepcompile.planner.apply import apply_plan

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.planner.candidate import Environment, Trial
from jax_deepcompile.planner.plan import KeptGathers, Plan, Prediction
from jax_deepcompile.planner.strategies.unshard_microbatches import (
    Repeat,
    UnshardMicrobatches,
    as_planned,
    choose_kept,
    repeats_of,
)
from tests.planner.microbatches import eight_layers
from tests.transforms.programs import count, sharded
from tests.transforms.test_prefetch import Clock
from tests.transforms.test_unshard import UNROLLED, accumulating, assert_same, unrolled_loss

CLOCK = Clock(gather_s=2.0)


def proposals(program, mesh, limit: int | None = 1 << 30, plan: Plan | None = None, exposed_s: float = 1.0):
    nothing: Any = None
    now = Trial(plan or Plan("0"), program, nothing, nothing, nothing, Prediction(1.0, 1.0, 1.0, exposed_s, 0), 0)
    return list(UnshardMicrobatches().propose(program, now, Environment(mesh, "cuda", CLOCK, limit)))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("limit", [1 << 30, 8192])
def test_as_much_as_memory_holds_is_gathered_once_to_the_same_bits(limit):
    program, mesh = accumulating(unrolled_loss, UNROLLED)
    (proposal,) = proposals(program, mesh, limit)
    planned = apply_plan(program, mesh, proposal.plan)
    assert count(planned, "all_gather") < count(program, "all_gather")
    assert_same(program, planned, mesh)


@pytest.mark.pure
def test_what_surely_fits_is_tried_where_more_does_not():
    program, mesh = accumulating(unrolled_loss, UNROLLED)
    (loop,) = find_loops(program)
    every_bytes = sum(repeat.size_bytes for repeat in repeats_of(loop, program.mesh, CLOCK))
    (close,), (roomy,) = proposals(program, mesh, every_bytes), proposals(program, mesh, 2 * every_bytes)
    assert close.plan == roomy.plan
    assert roomy.otherwise is None
    assert close.otherwise is not None
    assert set(close.otherwise.plan.kept[0].gathers) < set(close.plan.kept[0].gathers)


@pytest.mark.pure
@pytest.mark.parametrize(
    "situation",
    [{"limit": None}, {"limit": 1}, {"exposed_s": 0.0}, {"plan": Plan("0", kept=(KeptGathers("scan.0", (0,)),))}],
    ids=["no limit", "no room", "nothing waits", "decided already"],
)
def test_nothing_is_kept_without_memory_or_need(situation):
    assert proposals(*accumulating(unrolled_loss, UNROLLED), **situation) == []


@pytest.mark.pure
def test_a_step_without_microbatches_repeats_nothing():
    assert proposals(*sharded(unrolled_loss, UNROLLED)) == []


@pytest.mark.pure
def test_what_is_gathered_again_for_backward_saves_twice():
    program, _ = accumulating(unrolled_loss, UNROLLED)
    (loop,) = find_loops(program)
    repeats = repeats_of(loop, program.mesh, CLOCK)
    again = [repeat for repeat in repeats if len(repeat.positions) == 2]
    assert again
    assert all(0 < repeat.saved_s <= (loop.length - 1) * len(repeat.positions) * CLOCK.gather_s for repeat in repeats)
    assert sorted(position for repeat in repeats for position in repeat.positions) == list(
        range(sum(len(repeat.positions) for repeat in repeats))
    )


REPEATS = st.lists(
    st.tuples(st.sampled_from(["scan.0", "scan.1"]), st.floats(0.0, 10.0), st.integers(1, 100)), max_size=12
).map(lambda drawn: [Repeat(loop, (index,), *rest) for index, (loop, *rest) in enumerate(drawn)])


@pytest.mark.pure
@settings(deadline=None)
@given(REPEATS, st.integers(0, 600))
def test_the_choice_fits_and_nothing_better_was_left_for_it(repeats, free_bytes):
    chosen = choose_kept(repeats, free_bytes)
    held = sum(repeat.size_bytes for repeat in chosen)
    assert held <= free_bytes
    assert all(repeat.saved_s > 0 for repeat in chosen)
    assert len(set(chosen)) == len(chosen)
    left = [repeat for repeat in repeats if repeat.saved_s > 0 and repeat not in chosen]
    assert all(repeat.size_bytes > free_bytes - held for repeat in left)
    planned = {position for kept in as_planned(chosen) for position in kept.gathers}
    assert planned == {position for repeat in chosen for position in repeat.positions}


@pytest.mark.h100_aot
def test_layers_that_every_microbatch_gathers_are_waited_for_less():
    """Eight layers of 50 MB, four microbatches, on 32 H100s."""
    step, state, batch = eight_layers(rows=1024)
    found = step.plan(state, batch)
    before = step.reshard(passes=(deepcompile.BucketCollectives(),)).plan(state, batch)
    assert found.prediction is not None
    assert before.prediction is not None
    assert found.kept
    assert found.prediction.step_s < 0.8 * before.prediction.step_s
    assert found.prediction.peak_bytes < 40 << 30
