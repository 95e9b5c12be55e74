"""What stays gathered: as much as lets loops hide the rest, never more than fits, and nothing where nothing waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import optax
import pytest

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Loop, Simulation, Totals
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import state_on_host
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.layers import gathered_bytes as bytes_of_a_trip
from jax_deepcompile.planner.layers import layer_stacks
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.strategies import unshard
from jax_deepcompile.planner.strategies.unshard import Unshard, kept_layers
from jax_deepcompile.planner.strategy import Proposal
from jax_deepcompile.transforms.decision import Decision
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives, slice_names
from tests.planner.situations import HEADED, NO_MEMORY, SGD, START, accumulating, candidate, in_pipelines
from tests.transforms.programs import LAYERS, WIDTH, headed_loss, sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

PROGRAM, MESH = sharded(stack_loss, {"stack": stack_shapes()})
MATRIX_BYTES = LAYERS * WIDTH * 2 * WIDTH * 4
PIPELINED = in_pipelines(PROGRAM)
FORWARD, BACKWARD = (schedule.loop for schedule in PIPELINED.of(LoopSchedule))
MATRIX = slice_names(PROGRAM, next(find_loops(PROGRAM)))[0]
STACKS = layer_stacks(PROGRAM, PIPELINED)
LIMIT = 1 << 30


def proposals(
    trip: Totals,
    free_bytes: int = LIMIT,
    pipelined: bool = True,
    loop_bytes: int | None = None,
    gathered_bytes: int = 0,
) -> list[Proposal]:
    """What is proposed.

    Args:
      trip: every trip of the backward loop.
      free_bytes: at the peak.
      pipelined: whether its layers are gathered ahead.
      loop_bytes: live in loops over layers; None for no forward loop. One matrix is handed over then.
      gathered_bytes: of the whole step.
    """
    plan = PIPELINED if pipelined else START
    backward = Loop("while", "", LAYERS, True, 1.0, trip)
    memory = replace(NO_MEMORY, names=("while",), live_bytes=(LIMIT,))
    loops = (backward,)
    if loop_bytes is not None:
        memory = replace(memory, names=("ahead", "while"), live_bytes=(loop_bytes - LAYER_BYTES, loop_bytes))
        loops = (Loop("ahead", "", LAYERS, True, 1.0, replace(trip, reduced_bytes=0)), backward)
        plan = plan.having(SavedGathers, [SavedGathers(FORWARD, BACKWARD, (MATRIX,))])
    totals = Totals(communication_s=10.0, gathered_bytes=gathered_bytes)
    return proposals_for(PROGRAM, plan, Simulation(10.0, totals, loops, (), memory), free_bytes)


def proposals_for(program: Program, plan: Plan, run: Simulation, free_bytes: int, **more: Any) -> list[Proposal]:
    best = candidate(program, plan, Prediction(10.0, 5.0, 9.0, 5.0, LIMIT - free_bytes), run)
    return list(Unshard().propose(program, best, Environment(MESH, "cuda", CostModel(), LIMIT, **more)))


def handed(proposal: Proposal) -> int:
    return sum(len(choice.gathers) for choice in proposal.plan.of(SavedGathers))


def trip(communication_s: float, compute_s: float = 1.0) -> Totals:
    """Of it half gathers: the two matrices and the bias."""
    layer = (2 * MATRIX_BYTES) // LAYERS
    return Totals(compute_s, communication_s, gathered_bytes=layer, reduced_bytes=layer)


def test_all_that_fits_and_just_enough_are_both_tried():
    few, most = sorted(handed(each) for each in proposals(trip(1.1)) if handed(each))
    assert few < most == 3


def test_few_layers_may_run_apart_although_what_they_gather_can_be_saved(monkeypatch):
    assert max(layers_kept(each) for each in proposals(trip(4.0))) == LAYERS - 1
    monkeypatch.setattr(unshard, "_FEW_LAYERS", LAYERS - 1)
    assert not any(layers_kept(each) for each in proposals(trip(4.0)))


def test_a_loop_that_waits_for_everything_gets_everything():
    assert {handed(each) for each in proposals(trip(4.0))} >= {3}


def test_a_loop_that_hides_its_gathers_is_left_alone():
    assert proposals(trip(0.9)) == []


def test_loops_that_reduce_nothing_gather_for_the_first_time():
    assert proposals(replace(trip(4.0), reduced_bytes=0)) == []


def test_nothing_is_kept_that_does_not_fit():
    for each in proposals(trip(4.0), free_bytes=MATRIX_BYTES + 1):
        assert handed(each) < 3


def test_what_takes_a_little_less_is_tried_where_all_does_not_fit():
    most = max(proposals(trip(4.0)), key=handed)
    assert most.otherwise is not None
    assert 0 < handed(most.otherwise) < handed(most)
    (alone,) = proposals(trip(4.0), free_bytes=MATRIX_BYTES // 2)
    assert alone.otherwise is None


def test_without_memory_nothing_is_proposed():
    assert proposals(trip(4.0), free_bytes=0) == []


def layers_kept(proposal: Proposal | None) -> int:
    return 0 if proposal is None else kept_layers(proposal.plan, STACKS)


LAYER_BYTES = bytes_of_a_trip(next(find_loops(PROGRAM)))


def test_layers_are_kept_where_they_fit_beside_loops():
    """The peak is elsewhere, when the layers that were kept are gone."""
    (found,) = proposals(trip(4.0), free_bytes=0, loop_bytes=LIMIT - 2 * LAYER_BYTES)
    assert (layers_kept(found), found.otherwise) == (2, None)


def test_what_fits_beside_the_peak_is_what_is_kept_otherwise():
    """One of the two matrices is handed over already: backward gathers but half of a layer."""
    room = int(1.3 * LAYER_BYTES)
    (found,) = proposals(trip(4.0), free_bytes=room, loop_bytes=LIMIT - 3 * LAYER_BYTES)
    assert (layers_kept(found), layers_kept(found.otherwise)) == (3, 2)


def test_layers_that_save_little_are_not_kept():
    room = 2 * LAYER_BYTES
    assert proposals(trip(4.0), free_bytes=room, loop_bytes=LIMIT, gathered_bytes=100 * LAYER_BYTES)
    assert not proposals(trip(4.0), free_bytes=room, loop_bytes=LIMIT, gathered_bytes=200 * LAYER_BYTES)


def test_loops_that_are_not_pipelined_hand_over_too():
    found = proposals(trip(4.0), pipelined=False)
    assert max(handed(each) for each in found) == 3
    assert not any(each.plan.of(LoopSchedule) for each in found)


def surroundings_kept(free_bytes: int) -> list[Plan]:
    """Proposals for microbatches that keep what is gathered around the layers, and nothing of the layers."""
    program, _ = accumulating(headed_loss, HEADED)
    plan = in_pipelines(program)
    run = Simulation(10.0, Totals(communication_s=10.0), (), (), NO_MEMORY)
    plans = [each.plan for each in proposals_for(program, plan, run, free_bytes)]
    return [each for each in plans if each.of(KeptGathers) and each.without(KeptGathers) == plan]


def test_what_every_microbatch_gathers_around_its_layers_is_kept_where_it_fits():
    (plan,) = surroundings_kept(LIMIT)
    (kept,) = plan.of(KeptGathers)
    assert kept.loop == "microbatches"
    assert "head @forward" in kept.gathers
    assert surroundings_kept(WIDTH * WIDTH * 4 - 1) == []


def over_microbatches(
    communication_s: float,
    compute_s: float,
    optimizer: optax.GradientTransformation = SGD,
    already: Sequence[Decision] = (),
    **more: Any,
) -> list[Plan]:
    """What is proposed where both layer loops of every microbatch take so long a trip."""
    program, _ = accumulating(stack_loss, {"stack": stack_shapes()}, optimizer)
    plan = in_pipelines(program)
    plan = plan.replace(decisions=(*plan.decisions, *already))
    backward = trip(communication_s, compute_s)
    trips = (replace(backward, reduced_bytes=0), backward)
    loops = tuple(Loop(f"while.{each}", "", LAYERS, True, 1.0, trips[each], 4) for each in range(2))
    run = Simulation(10.0, Totals(communication_s=10.0), loops, (), NO_MEMORY)
    return [each.plan for each in proposals_for(program, plan, run, more.pop("free_bytes", LIMIT), **more)]


def stacks_kept(plan: Plan) -> int:
    return sum(len(stack.gathers) for stack in plan.of(StackCollectives)[:1])


def kept_over_microbatches(communication_s: float, compute_s: float) -> list[int]:
    """How many stacks each proposal keeps."""
    return sorted(filter(None, map(stacks_kept, over_microbatches(communication_s, compute_s))))


def test_over_microbatches_all_that_fits_and_just_enough_are_both_tried():
    """More than enough would have to be gathered before the first microbatch, with nothing to hide under."""
    few, most = kept_over_microbatches(1.1, 1.0)
    assert few < most == 3


def test_over_microbatches_loops_that_wait_for_everything_get_both_matrices_at_least():
    assert min(kept_over_microbatches(4.0, 0.1)) >= 2


def test_over_microbatches_loops_that_hide_their_gathers_are_offered_everything_only():
    assert kept_over_microbatches(0.9, 1.0) == [3]


ADAM, HOST_BYTES = optax.adam(0.1), 1 << 30
MOMENTS_AWAY = OffloadedState(("state/opt_state/0/mu/stack/up",))


def moments_away(monkeypatch: pytest.MonkeyPatch, **situation: Any) -> list[Plan]:
    monkeypatch.setattr(state_on_host, "COPIED_BYTES", 1)
    told = {"free_bytes": int(1.9 * MATRIX_BYTES), "host_bytes": HOST_BYTES, "optimizer": ADAM} | situation
    return [each for each in over_microbatches(4.0, 0.1, **told) if each.of(OffloadedState)]


def test_moments_on_the_host_make_room_for_more(monkeypatch):
    """What the update alone reads, once for all microbatches; stacks at a time, or layer by layer."""
    found = moments_away(monkeypatch)
    assert [(stacks_kept(each), each.of(OffloadedState)[0].by_layer) for each in found] == [(2, True), (2, False)]
    for each in found:
        (away,) = each.of(OffloadedState)
        assert {leaf.split("/")[-3] for leaf in away.leaves} == {"mu", "nu"}


@pytest.mark.parametrize(
    "situation",
    [
        {"host_bytes": 0},
        {"free_bytes": LIMIT},
        {"optimizer": SGD},
        {"disabled": frozenset({"offload_state"})},
        {"already": [MOMENTS_AWAY]},
    ],
    ids=["no host", "no need", "no moments", "left out", "there already"],
)
def test_moments_stay_where_there_is_no_host_or_no_need(monkeypatch, situation):
    assert [each for each in moments_away(monkeypatch, **situation) if each.of(OffloadedState) != (MOMENTS_AWAY,)] == []
