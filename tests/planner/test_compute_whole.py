"""Statistics of batch norms are proposed to be computed whole; of what has none nothing is compiled."""

from __future__ import annotations

import pytest

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.planner.candidate import Environment, evaluate
from jax_deepcompile.planner.strategies.compute_whole import ComputeWhole
from jax_deepcompile.transforms.compute_whole import ComputedWhole
from tests.planner.situations import START, UNROLLED, candidate, situation, unrolled_loss
from tests.schedules import gathers, instructions
from tests.transforms.programs import h100s
from tests.transforms.test_compute_whole import normed


@pytest.mark.pure
def test_once_for_what_has_statistics_that_are_divided():
    program, mesh = normed()
    environment = Environment(mesh, "cuda", CostModel(), None)
    (proposal,) = ComputeWhole().propose(program, candidate(program), environment)
    assert [type(each) for each in proposal.plan.decisions] == [ComputedWhole]
    assert not list(ComputeWhole().propose(program, candidate(program, proposal.plan), environment))


@pytest.mark.pure
def test_not_for_what_has_none():
    assert not list(ComputeWhole().propose(*situation(unrolled_loss, UNROLLED, CostModel())))


@pytest.mark.h100_aot
def test_on_gpus_there_are_fewer_collectives_and_the_step_is_faster():
    program, mesh = normed(h100s(), width=1024)
    environment = Environment(mesh, "cuda", CostModel(), None)
    before = evaluate(program, START, environment)
    (proposal,) = ComputeWhole().propose(program, before, environment)
    after = evaluate(program, proposal.plan, environment)
    apart, whole = (gathers(instructions(each.evaluated.module)) for each in (before, after))
    assert whole < apart
    assert after.prediction.step_s < 0.95 * before.prediction.step_s
