"""What goes with pipelined loops, comes and goes with them."""

from __future__ import annotations

import pytest

from jax_deepcompile.planner.layers import AROUND_PIPELINED, layer_stacks, loops_around, not_pipelined, pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions
from tests.planner.situations import HEADED, START, accumulating, in_pipelines
from tests.transforms.programs import deeper_schedules, headed_loss, sharded

pytestmark = pytest.mark.pure

PROGRAM, _ = sharded(headed_loss, HEADED)
MICROBATCHED, _ = accumulating(headed_loss, HEADED)
PIPELINED = in_pipelines(MICROBATCHED)


def test_what_goes_with_pipelined_loops_is_there_once():
    again = pipelined(PIPELINED, MICROBATCHED, deeper_schedules(MICROBATCHED, 2, 2))
    for plan in (PIPELINED, again):
        assert [each for each in plan.decisions if each in AROUND_PIPELINED] == list(AROUND_PIPELINED)
        assert plan.of(MicrobatchLoop) == (MicrobatchLoop("microbatches"),)
    assert again.of(LoopSchedule) != PIPELINED.of(LoopSchedule)


@pytest.mark.parametrize("program", [PROGRAM, MICROBATCHED], ids=["step", "microbatches"])
def test_without_pipelined_loops_nothing_of_it_is_left(program):
    start = START.having(OrderedReductions, [OrderedReductions(1)])
    assert not_pipelined(in_pipelines(program, start)) == start
    assert pipelined(in_pipelines(program, start), program, ()) == start


def test_gathers_that_start_early_are_named_after_what_loops_make_and_go_with_it():
    early = PIPELINED.having(Prefetch, [Prefetch("head @forward", "layer dot_general @forward")])
    assert pipelined(early, MICROBATCHED, deeper_schedules(MICROBATCHED, 2, 2)).of(Prefetch) == ()
    assert not_pipelined(early).of(Prefetch) == ()


def test_loops_around_others_are_named():
    schedules = choose_schedules(MICROBATCHED)
    assert loops_around(MICROBATCHED, schedules) == ["microbatches"]
    assert loops_around(PROGRAM, choose_schedules(PROGRAM)) == loops_around(MICROBATCHED, ()) == []


@pytest.mark.parametrize("plan", [START, PIPELINED], ids=["as they are", "pipelined"])
def test_forward_and_backward_over_the_same_layers_are_a_pair(plan: Plan):
    ((forward, backward),) = layer_stacks(MICROBATCHED, plan)
    assert (forward.name, backward.name) == ("stack @forward", "stack @backward")


def test_loops_that_do_not_gather_ahead_are_no_pair():
    schedules = [LoopSchedule("stack @forward", 0, 0), LoopSchedule("stack @backward", 0, 1)]
    assert layer_stacks(MICROBATCHED, PIPELINED.having(LoopSchedule, schedules)) == []
