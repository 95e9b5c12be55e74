"""Loops that gather and reduce a second layer away: proposed where something is waited for and memory has room."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Loop, Totals
from jax_deepcompile.lowering.compile import double_buffering
from jax_deepcompile.planner.candidate import Candidate, Environment, evaluate
from jax_deepcompile.planner.layers import gathered_bytes, pipelined
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.strategies.deepen_loops import DeepenLoops
from jax_deepcompile.planner.strategy import Proposal
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from tests.planner.situations import START, candidate
from tests.schedules import loop_bodies, work_while_under_way
from tests.transforms.programs import assert_same_work, deeper_schedules, h100s, sharded, stack_loss, stack_shapes

PROGRAM, MESH = sharded(stack_loss, {"stack": stack_shapes()})
FORWARD, BACKWARD = SCHEDULES = choose_schedules(PROGRAM)
PLAN = pipelined(START, PROGRAM, SCHEDULES)
LAYER_BYTES = gathered_bytes(next(find_loops(PROGRAM)))
LIMIT = 1 << 30
EARLIER, LATER = replace(BACKWARD, prefetch_layers=2, last_layers=2), replace(BACKWARD, delay_layers=2, first_layers=2)


def proposals(plan: Plan = PLAN, free_bytes: int = LIMIT, exposed_s: float = 1.0, trip_s: float = 1.0, layers: int = 2):
    loop = Loop("while", "", 5, True, trip_s, Totals(compute_s=1.0, communication_s=1.0, reduced_bytes=1))
    run: Any = SimpleNamespace(loops=(loop,))
    prediction = Prediction(10.0, 5.0, 9.0, exposed_s, LIMIT - free_bytes)
    best = candidate(PROGRAM, plan, prediction, run)
    return list(DeepenLoops(layers).propose(PROGRAM, best, Environment(MESH, "cuda", CostModel(), LIMIT)))


def loops(found: list[Proposal]) -> list[tuple[LoopSchedule, ...]]:
    return [proposal.plan.of(LoopSchedule) for proposal in found]


@pytest.mark.pure
def test_backward_loops_may_gather_earlier():
    assert loops(proposals()) == [(FORWARD, EARLIER)]


@pytest.mark.pure
def test_reducing_later_is_tried_where_layers_are_waited_for():
    assert loops(proposals(trip_s=1.2))[-1] == (FORWARD, LATER)
    assert (FORWARD, LATER) not in loops(proposals(trip_s=1.01))


@pytest.mark.pure
@pytest.mark.parametrize(
    "situation",
    [
        {"exposed_s": 0.01},
        {"free_bytes": LAYER_BYTES - 1},
        {"layers": 1, "trip_s": 2.0},
        {"plan": START, "trip_s": 2.0},
        {"plan": PLAN.having(LoopSchedule, (replace(FORWARD, prefetch_layers=2), EARLIER))},
    ],
    ids=["nothing waits", "no room", "one layer is enough", "no loops", "deep already"],
)
def test_nothing_is_proposed_for_nothing(situation):
    assert proposals(**situation) == []


@pytest.mark.pure
def test_loops_that_gather_nothing_ahead_are_left():
    plan = PLAN.having(LoopSchedule, [replace(BACKWARD, prefetch_layers=0, last_layers=0)])
    assert proposals(plan) == []


@pytest.mark.pure
def test_what_microbatches_reduce_later_stays_so():
    delayed = (DelayedReductions("microbatches", ("head",)),)
    found = proposals(PLAN.having(DelayedReductions, delayed), trip_s=1.2)
    assert [proposal.plan.of(DelayedReductions) for proposal in found] == [delayed] * 2


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("schedules", [(FORWARD, EARLIER), (FORWARD, LATER)], ids=["earlier", "later"])
def test_deeper_loops_compute_the_same_bits(schedules):
    assert_same_work(PLAN.having(LoopSchedule, schedules).program(PROGRAM, MESH), PROGRAM, MESH)


@pytest.fixture(scope="module")
def compiled() -> list[Candidate]:
    """Wide layers on 8 H100s, their loops one layer deep and two."""
    width, layers = 1024, 8
    params = {
        "stack": {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width), "bias": (layers, 4 * width)}
    }
    program, mesh = sharded(stack_loss, params, batch=(64 * 1024, width), mesh=h100s())
    start = START.replace(options=double_buffering())
    environment = Environment(mesh, "cuda", CostModel(), None)
    deep = [deeper_schedules(program, layers, layers) for layers in (1, 2)]
    return [evaluate(program, pipelined(start, program, each), environment) for each in deep]


@pytest.mark.h100_aot
def test_deeper_loops_hide_as_much_and_take_little_more(compiled):
    one, two = compiled
    work = [found for body in loop_bodies(two.evaluated.module) for found in work_while_under_way(body)]
    assert {opcode for opcode, _ in work} == {"all-gather-start", "reduce-scatter-start"}
    assert all(number for _, number in work), work
    assert one.prediction.peak_bytes < two.prediction.peak_bytes < 1.35 * one.prediction.peak_bytes
    assert two.simulation.gathered_bytes == pytest.approx(one.simulation.gathered_bytes)
