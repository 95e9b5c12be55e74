"""Layers written one by one, under gradient accumulation: gathered once where memory holds them, most worth first."""

from __future__ import annotations

from dataclasses import replace

import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.strategies.unshard_microbatches import Repeat, UnshardMicrobatches, as_planned, repeats_of
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names
from tests.planner.situations import START, UNROLLED, WAITS, Clock, accumulating, candidate, eight_layers, unrolled_loss
from tests.transforms.programs import assert_same_values, count, sharded

CLOCK = Clock(gather_s=2.0)


def proposals(program, mesh, limit: int | None = 1 << 30, plan: Plan = START, exposed_s: float = 1.0):
    best = candidate(program, plan, replace(WAITS, exposed_s=exposed_s))
    return list(UnshardMicrobatches().propose(program, best, Environment(mesh, "cuda", CLOCK, limit)))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("limit", [1 << 30, 8192])
def test_as_much_as_memory_holds_is_gathered_once_to_the_same_bits(limit):
    program, mesh = accumulating(unrolled_loss, UNROLLED)
    (proposal,) = proposals(program, mesh, limit)
    planned = proposal.plan.program(program, mesh)
    assert count(planned, "all_gather") < count(program, "all_gather")
    assert_same_values(planned, program, mesh)


@pytest.mark.pure
def test_what_surely_fits_is_tried_where_more_does_not():
    program, mesh = accumulating(unrolled_loss, UNROLLED)
    (loop,) = find_loops(program)
    every_bytes = sum(repeat.size_bytes for repeat in repeats_of(program, loop, CLOCK))
    (close,), (roomy,) = proposals(program, mesh, every_bytes), proposals(program, mesh, 2 * every_bytes)
    assert close.plan == roomy.plan
    assert roomy.otherwise is None
    assert close.otherwise is not None
    (less,), (more,) = (each.plan.of(KeptGathers) for each in (close.otherwise, close))
    assert set(less.gathers) < set(more.gathers)


@pytest.mark.pure
@pytest.mark.parametrize(
    "situation",
    [
        {"limit": None},
        {"limit": 1},
        {"exposed_s": 0.0},
        {"plan": Plan("0", (KeptGathers("microbatches", ("layer0/up @forward",)),))},
    ],
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
    repeats = repeats_of(program, loop, CLOCK)
    again = [repeat for repeat in repeats if len(repeat.gathers) == 2]
    assert again
    assert all(0 < repeat.saved_s <= (loop.length - 1) * len(repeat.gathers) * CLOCK.gather_s for repeat in repeats)
    found = [name for repeat in repeats for name in repeat.gathers]
    assert sorted(found) == sorted(hoistable_names(program, loop))


@pytest.mark.pure
def test_a_plan_has_the_choice_loop_by_loop():
    chosen = [Repeat(loop, gathers, 1.0, 1) for loop, gathers in (("b", ("x",)), ("a", ("y", "z")), ("b", ("w",)))]
    assert as_planned(chosen) == (KeptGathers("a", ("y", "z")), KeptGathers("b", ("x", "w")))


@pytest.mark.slow
@pytest.mark.h100_aot
def test_layers_that_every_microbatch_gathers_are_waited_for_less():
    """Eight layers of 50 MB, four microbatches, on 32 H100s."""
    step, state, batch = eight_layers(rows=1024)
    found = step.plan(state, batch)
    before = step.reshard(passes=(deepcompile.BucketCollectives(),)).plan(state, batch)
    assert found.prediction is not None
    assert before.prediction is not None
    assert found.of(KeptGathers)
    assert found.prediction.step_s < 0.8 * before.prediction.step_s
    assert found.prediction.peak_bytes < 40 << 30
