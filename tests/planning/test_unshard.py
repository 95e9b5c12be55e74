"""What stays gathered: as much as lets loops hide the rest, never more than fits, and nothing where nothing waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.simulation import Loop, Simulation, Totals
from jax_deepcompile.passes.pipeline_loops import choose_schedules
from jax_deepcompile.planning.pass_manager import Environment, Proposal, Trial
from jax_deepcompile.planning.plan import Plan, Prediction
from jax_deepcompile.planning.proposals import Unshard
from tests.passes.programs import LAYERS, WIDTH, sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

PROGRAM, MESH = sharded(stack_loss, {"stack": stack_shapes()})
MATRIX_BYTES = LAYERS * WIDTH * 2 * WIDTH * 4
LIMIT = 1 << 30


def proposals(trip: Totals, free_bytes: int = LIMIT, pipelined: bool = True) -> list[Proposal]:
    """What is proposed where every trip of the backward loop is ``trip``."""
    plan = Plan("0").replace(loops=choose_schedules(PROGRAM) if pipelined else ())
    backward = Loop("while", "", LAYERS, True, 1.0, trip)
    nothing: Any = None
    run = Simulation(10.0, Totals(), (backward,), (), MemoryUse(0, 0, 0, 0, (), (), ()))
    prediction = Prediction(10.0, 5.0, 9.0, 5.0, LIMIT - free_bytes)
    now = Trial(plan, PROGRAM, nothing, run, prediction, 0)
    return list(Unshard().propose(PROGRAM, now, Environment(MESH, "cuda", CostModel(), LIMIT)))


def handed(proposal: Proposal) -> int:
    return sum(len(choice.shared) for choice in proposal.plan.handed_over)


def trip(communication_s: float, compute_s: float = 1.0) -> Totals:
    """Of it half gathers: the two matrices and the bias."""
    layer = (2 * MATRIX_BYTES) // LAYERS
    return Totals(compute_s, communication_s, gathered_bytes=layer, reduced_bytes=layer)


def test_all_that_fits_and_just_enough_are_both_tried():
    few, most = sorted(handed(each) for each in proposals(trip(1.1)))
    assert few < most == 3


def test_a_loop_that_waits_for_everything_gets_everything():
    assert {handed(each) for each in proposals(trip(4.0))} >= {3}


def test_a_loop_that_hides_its_gathers_is_left_alone():
    assert proposals(trip(0.9)) == []


def test_loops_that_reduce_nothing_gather_for_the_first_time():
    assert proposals(replace(trip(4.0), reduced_bytes=0)) == []


def test_nothing_is_kept_that_does_not_fit():
    for each in proposals(trip(4.0), free_bytes=MATRIX_BYTES + 1):
        assert handed(each) < 3


def test_without_memory_nothing_is_proposed():
    assert proposals(trip(4.0), free_bytes=0) == []


def test_loops_that_are_not_pipelined_hand_over_too():
    found = proposals(trip(4.0), pipelined=False)
    assert max(handed(each) for each in found) == 3
    assert all(each.plan.loops == () for each in found)
