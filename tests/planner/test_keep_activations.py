"""Activations are kept, or copied to the host, where backward computes longer than it communicates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Loop, Simulation, Totals
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.lowering.compile import copies_at_once, double_buffering
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.layers import all_pipelined, not_pipelined
from jax_deepcompile.planner.phases import Phases
from jax_deepcompile.planner.places import Places
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.recomputation import find_recomputation
from jax_deepcompile.planner.residency import Choice, choose
from jax_deepcompile.planner.stacks import Stack
from jax_deepcompile.planner.strategies import keep_activations
from jax_deepcompile.planner.strategies.keep_activations import KeepActivations
from jax_deepcompile.planner.strategy import Proposal
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_on_device import KeptOnDevice
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_parameters import OffloadedParameters
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from tests.planner.situations import NO_MEMORY, candidate, in_pipelines
from tests.transforms.programs import LAYERS, layer, plain_loss, run_stack, sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

WIDTH, ROWS = 2048, 4096


def wide_stack(layers: int = LAYERS) -> dict:
    return {"up": (layers, WIDTH, 2 * WIDTH), "down": (layers, 2 * WIDTH, WIDTH), "bias": (layers, 2 * WIDTH)}


PROGRAM, MESH = sharded(stack_loss, {"stack": wide_stack()}, batch=(8 * ROWS, WIDTH))
TURNS = find_recomputation(PROGRAM, CostModel())
(TURN,) = TURNS
PRODUCT_BYTES = 4 * LAYERS * ROWS * 2 * WIDTH
"""Of the one product that backward needs: tanh of it is computed again at no cost to speak of."""
INPUT_BYTES = 4 * ROWS * WIDTH
"""Of a layer."""
NETWORK_BYTES_PER_S = 1e11
MIB, GIB = 1 << 20, 1 << 30
PLENTY = 1 << 40
TOLERANCE_BYTES = 4096
"""By which the solver may miss a limit."""


def phases(compute_s: float = 1.0, network_s: float = 0.0) -> Phases:
    return Phases(0.5, compute_s, network_s, NETWORK_BYTES_PER_S)


def chosen(
    free_bytes: float = PLENTY, compute_s: float = 1.0, network_s: float = 0.0, stacks: tuple[Stack, ...] = ()
) -> Choice:
    choice = choose(TURNS, stacks, phases(compute_s, network_s), free_bytes)
    assert choice is not None
    return choice


def kept_bytes(choice: Choice) -> int:
    return sum(turn.kept_bytes(choice.places.kept.get(turn.loops, ())) for turn in TURNS)


def stack(size: int) -> Stack:
    return Stack(tuple((loop, "up") for loop in TURN.loops), size)


def test_the_product_is_kept_where_it_fits():
    choice = chosen(PRODUCT_BYTES)
    assert kept_bytes(choice) == choice.device_bytes == PRODUCT_BYTES
    assert choice.gained_s > 0


def test_nothing_is_kept_that_does_not_fit():
    assert chosen(PRODUCT_BYTES - MIB).places == Places()


@settings(deadline=None)
@given(st.integers(0, 4 * PRODUCT_BYTES), st.floats(0, 1), st.floats(0, 1), st.lists(st.integers(1, PRODUCT_BYTES)))
def test_what_is_kept_fits_and_what_is_gained_adds_up(free_bytes, compute_s, network_s, sizes):
    choice = chosen(free_bytes, compute_s, network_s, tuple(map(stack, sizes)))
    taken_bytes = sum(each.size_bytes for each in choice.stacks)
    assert kept_bytes(choice) + taken_bytes == choice.device_bytes <= free_bytes + TOLERANCE_BYTES
    kept = choice.places.kept.get(TURN.loops, ())
    freed = TURN.demand.freed([var for position in kept for var in TURN.activations[position].again])
    compute = compute_s, compute_s - TURN.step_s(sum(TURN.seconds[each] for each in freed))
    network = network_s, network_s - taken_bytes / NETWORK_BYTES_PER_S
    before_s, after_s = (max(one, 0.9 * other, 0.0) for one, other in zip(compute, network, strict=True))
    copied_s = sum(map(TURN.copying_s, kept))
    assert choice.gained_s == pytest.approx(before_s - after_s - copied_s, abs=1e-5)


def test_backward_that_waits_for_the_network_has_nothing_to_compute_less_for():
    assert chosen(network_s=1.2).places == Places()


def test_it_is_given_parameters_until_it_waits_for_compute():
    choice = chosen(network_s=1.2, stacks=(stack(3 * 10**10),))
    assert choice.stacks == (stack(3 * 10**10),)
    assert kept_bytes(choice) == PRODUCT_BYTES


def test_with_as_much_compute_as_network_both_are_kept():
    """Schedules do not hide everything where neither has time to spare."""
    choice = chosen(network_s=1.0, stacks=(stack(2 * 10**10),))
    assert kept_bytes(choice) == PRODUCT_BYTES
    assert choice.stacks == ()


def test_parameters_that_are_not_waited_for_are_not_kept():
    assert chosen(network_s=0.5, stacks=(stack(GIB),)).stacks == ()


def test_small_products_are_computed_again():
    program, _ = sharded(stack_loss, {"stack": stack_shapes()})
    choice = choose(find_recomputation(program, CostModel()), (), phases(), PLENTY)
    assert choice is not None
    assert choice.gained_s < 1e-4


def test_what_is_no_part_of_backward_loops_is_kept_whatever_they_wait_for():
    """Unrolled layers beside a scanned stack whose backward loop waits for the network."""

    def both(params, batch):
        x = run_stack(params["stack"], batch)
        for name in ("a", "b"):
            x = jax.checkpoint(layer)(x, params[name])
        return jnp.mean(x**2)

    one = {name: shape[1:] for name, shape in wide_stack().items()}
    program, _ = sharded(both, {"stack": wide_stack(), "a": one, "b": one}, batch=(8 * ROWS, WIDTH))
    found = find_recomputation(program, CostModel())
    again = next(turn.loops for turn in found if turn.is_of_loops)
    assert {turn.loops for turn in found} == {again, ("", "")}
    for network_s, kept in ((2.0, {("", "")}), (0.0, {again, ("", "")})):
        choice = choose(found, (), phases(network_s=network_s), PLENTY)
        assert choice is not None
        assert set(choice.places.kept) == kept


def test_what_another_one_makes_needless_is_not_kept():
    def chain(params, batch):
        def body(x, w):
            return jnp.tanh((x @ lax.stop_gradient(w["up"])) @ lax.stop_gradient(w["down"])) + w["bias"], None

        return jnp.mean(lax.scan(jax.checkpoint(body), batch, params["stack"])[0] ** 2)

    shapes = wide_stack() | {"bias": (LAYERS, WIDTH)}
    program, _ = sharded(chain, {"stack": shapes}, batch=(8 * ROWS, WIDTH))
    (turn,) = find_recomputation(program, CostModel())
    choice = choose([turn], (), phases(), PLENTY)
    assert choice is not None
    (positions,) = choice.places.kept.values()
    assert len(positions) == 1


def proposals(
    program: Program = PROGRAM,
    limit_bytes: int | None = PLENTY,
    step_s: float = 0.01,
    plan: Plan | None = None,
    peak_bytes: int = MIB,
    moved_bytes: int = MIB,
    exposed_s: float = 0.0,
    exposed_copy_s: float = 0.0,
    **more: Any,
) -> list[Proposal]:
    forward, backward = Totals(0.02), Totals(0.03, 0.0, gathered_bytes=moved_bytes, reduced_bytes=moved_bytes)
    loops = tuple(Loop(f"while.{at}", "", LAYERS, True, 1.0, trip) for at, trip in enumerate((forward, backward)))
    run = Simulation(step_s, Totals(), loops, (), NO_MEMORY)
    expected = Prediction(step_s, 0.0, 0.0, exposed_s, peak_bytes, exposed_copy_s=exposed_copy_s)
    best = candidate(program, plan or in_pipelines(program), expected, run)
    environment = Environment(MESH, "cuda", CostModel(), limit_bytes, **more)
    return list(KeepActivations().propose(program, best, environment))


def test_what_is_proposed_can_be_carried_out():
    (proposal,) = proposals()
    assert proposal.decision == "1 activations of every layer are kept, +0.31 GiB on the device"
    verify(proposal.plan.program(PROGRAM, MESH))


def test_what_is_proposed_is_not_proposed_again():
    (proposal,) = proposals(host_bytes=PLENTY)
    assert proposals(host_bytes=PLENTY, plan=proposal.plan) == []


def test_of_equally_good_choices_one_is_proposed(monkeypatch):
    """The solver may keep other values of as many bytes where it has the host's memory as well, and use none of it."""

    def other_where_there_is_a_host(regions, stacks, phases, device_bytes, host_bytes, *others):
        choice = choose(regions, stacks, phases, device_bytes, 0, *others)
        assert choice is not None
        ((loops, (position,)),) = choice.places.kept.items()
        return replace(choice, places=Places({loops: (position + bool(host_bytes),)}))

    monkeypatch.setattr(keep_activations, "choose", other_where_there_is_a_host)
    assert len(proposals(host_bytes=PLENTY)) == 1


def test_only_what_fits_is_proposed():
    assert len(proposals(limit_bytes=int(1.2 * PRODUCT_BYTES))) == 1
    assert proposals(limit_bytes=PRODUCT_BYTES // 2) == []


def test_where_nothing_communicates_activations_are_kept_all_the_same():
    assert len(proposals(moved_bytes=0)) == 1


def test_what_the_device_has_no_room_for_is_copied_to_the_host_a_layer_at_a_time():
    """The layers' inputs, which make room for the product."""
    (proposal,) = proposals(limit_bytes=PRODUCT_BYTES, host_bytes=PLENTY)
    assert proposal.plan.of(OffloadedActivations) == (OffloadedActivations(*TURN.loops, ("stack input",)),)
    assert proposal.decision == (
        "1 activations of every layer are kept, 1 of every layer are on the host meanwhile, 0.16 GiB, "
        "+0.25 GiB on the device"
    )
    forward, backward = proposal.plan.of(LoopSchedule)
    assert (forward.delay_layers, backward.prefetch_layers) == (1, 1)
    assert dict(proposal.plan.options) == double_buffering() | copies_at_once()
    verify(proposal.plan.program(PROGRAM, MESH))


def rungs(proposal: Proposal | None) -> list[Proposal]:
    return [] if proposal is None else [proposal, *rungs(proposal.otherwise)]


def test_a_step_that_does_not_fit_is_made_to_by_what_it_kept_anyway():
    """With layers ahead of their turn, and without; in either way with all of the state on the host, if need be."""
    over = LAYERS * INPUT_BYTES // 8
    for proposal in proposals(peak_bytes=GIB + over, limit_bytes=GIB, host_bytes=PLENTY, step_s=1000.0):
        assert OffloadedActivations(*TURN.loops, ("stack input",)) in proposal.plan.of(OffloadedActivations)
    assert proposals(peak_bytes=GIB + over, limit_bytes=GIB) == []
    ahead, alone = proposals(peak_bytes=GIB + 8 * over, limit_bytes=GIB, host_bytes=PLENTY)
    away = [[leaf for each in rung.plan.of(OffloadedState) for leaf in each.leaves] for rung in rungs(ahead)]
    assert [len(leaves) for leaves in away] == sorted(map(len, away))
    assert away[0] == []
    for rung, least in zip(rungs(ahead), rungs(alone), strict=True):
        assert least.decision == f"{rung.decision}, with no layer ahead of its turn"
        assert least.plan.decisions == rung.plan.without(LoopSchedule, StackCollectives).decisions


def test_loops_that_had_no_room_for_a_layer_ahead_gather_one_beside_what_makes_it():
    at = {"limit_bytes": GIB, "host_bytes": PLENTY, "plan": Plan("0"), "moved_bytes": 0}
    full = proposals(peak_bytes=GIB, exposed_s=0.005, **at)
    assert [len(each.plan.of(LoopSchedule)) for each in full] == [2]
    assert full[0].plan.of(OffloadedActivations) != ()
    assert full[0].decision.startswith("2 loops gather a layer ahead; ")
    verify(full[0].plan.program(PROGRAM, MESH))
    assert proposals(peak_bytes=GIB, exposed_s=0.0, **at) == []
    roomy = proposals(peak_bytes=GIB // 2, exposed_s=0.005, **at)
    assert not any(each.plan.of(LoopSchedule) for each in roomy)


def test_loops_that_compute_again_what_they_kept_still_do_where_they_gather_a_layer_ahead():
    program, _ = sharded(plain_loss, {"stack": wide_stack()}, batch=(8 * ROWS, WIDTH))
    plan = Plan("0").having(Rematerialized, [Rematerialized("stack @forward", "stack @backward")])
    at = {"limit_bytes": GIB, "host_bytes": PLENTY, "peak_bytes": GIB + 64 * MIB}
    ahead = [each for each in proposals(program, plan=plan, **at) if each.plan.of(LoopSchedule)]
    assert ahead
    for proposal in ahead:
        assert proposal.plan.of(Rematerialized) == plan.of(Rematerialized)
        verify(proposal.plan.program(program, MESH))


def test_layers_of_blocks_without_checkpoint_are_computed_again_within_blocks_that_are():
    def block(x, layers):
        return lax.scan(lambda x, w: (layer(x, w), None), x, layers)[0], None

    def loss(params, batch):
        return jnp.mean(lax.scan(block, batch, params["stack"])[0] ** 2)

    blocks = {"stack": {name: (3, *shape) for name, shape in wide_stack().items()}}
    program, _ = sharded(loss, blocks, batch=(8 * ROWS, WIDTH))
    found = [rung.plan for ladder in proposals(program, peak_bytes=2 * GIB) for rung in rungs(ladder)]
    assert {len(each.of(Rematerialized)) for each in found} >= {1, 2}
    for plan in found:
        verify(plan.program(program, MESH))


def test_parameters_that_are_copied_by_layer_are_not_gathered_for_all_layers_at_once():
    width = 896
    shapes = {"up": (LAYERS, width, width), "down": (LAYERS, width, width), "bias": (LAYERS, width)}
    program, _ = sharded(stack_loss, {"stack": shapes}, batch=(8 * ROWS, width))
    environment = Environment(MESH, "cuda", CostModel(), GIB, PLENTY)
    at = {"limit_bytes": GIB, "host_bytes": PLENTY}
    plan = all_pipelined(Plan("0"), program, environment)
    assert "stack/up" in plan.of(StackCollectives)[0].gathers
    found = proposals(program, plan=plan, peak_bytes=2 * GIB, **at)
    away = [each.plan for ladder in found for each in rungs(ladder) if each.plan.of(OffloadedParameters)]
    assert away
    for each in [*away, all_pipelined(not_pipelined(away[-1]), program, environment)]:
        copied = {leaf for decision in each.of(OffloadedParameters) for leaf in decision.leaves}
        assert all(copied.isdisjoint(decision.gathers) for decision in each.of(StackCollectives))
        verify(each.program(program, MESH))


@pytest.mark.parametrize(("alone", "scanned", "again"), [(4, 2, True), (2, 8, False)])
def test_layers_of_their_own_beside_a_loop_are_computed_again_where_most_is_held_by_them(alone, scanned, again):
    def loss(params, batch):
        for each in params["alone"]:
            batch = layer(batch, each)
        return jnp.mean(run_stack(params["stack"], batch, remat=False) ** 2)

    one = {name: shape[1:] for name, shape in wide_stack().items()}
    program, _ = sharded(loss, {"alone": [one] * alone, "stack": wide_stack(scanned)}, batch=(8 * ROWS, WIDTH))
    found = proposals(program, plan=Plan("0"), peak_bytes=2 * GIB, limit_bytes=GIB, step_s=1000.0)
    assert any(each.plan.of(RematerializedSegments) for each in found) == again
    assert any(each.plan.of(Rematerialized) for each in found)
    for each in found:
        verify(each.plan.program(program, MESH))


def test_copies_of_a_policy_that_are_waited_for_are_done_without_where_there_is_room():
    """Whatever else is kept; what there is no room for goes to the host by decisions of the plan."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["up"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(params, batch):
        def body(x, w):
            return x + jnp.tanh(checkpoint_name(x @ w["up"], "up")) @ w["down"], None

        return jnp.mean(lax.scan(jax.checkpoint(body, policy=policy), batch, params["stack"])[0] ** 2)

    program, _ = sharded(loss, {"stack": wide_stack()}, batch=(8 * ROWS, WIDTH))
    free = {"moved_bytes": 0, "host_bytes": PLENTY}
    assert proposals(program, exposed_copy_s=0.0, **free) == []
    (roomy,) = proposals(program, exposed_copy_s=0.005, **free)
    assert roomy.plan.of(KeptOnDevice) == (KeptOnDevice(),)
    assert roomy.plan.of(OffloadedActivations) == ()
    verify(roomy.plan.program(program, MESH))
    (narrow,) = proposals(program, exposed_copy_s=0.005, limit_bytes=PRODUCT_BYTES, **free)
    assert narrow.plan.of(KeptOnDevice) == (KeptOnDevice(),)
    assert narrow.plan.of(OffloadedActivations) != ()
    verify(narrow.plan.program(program, MESH))


def test_what_is_left_out_by_name_is_not_proposed():
    assert proposals(limit_bytes=PRODUCT_BYTES, host_bytes=PLENTY, disabled=frozenset({"offload_activations"})) == []


def test_without_activations_on_the_host_there_is_still_its_memory_for_the_state():
    over = {"peak_bytes": GIB + 8 * MIB, "limit_bytes": GIB, "host_bytes": PLENTY, "step_s": 1000.0}
    *_, least = rungs(proposals(**over, disabled=frozenset({"offload_activations"}))[-1])
    assert least.plan.of(OffloadedActivations) == ()
    assert least.plan.of(OffloadedState) != ()
    assert proposals(**over, disabled=frozenset({"offload_activations", "offload_state"})) == []


def test_without_a_limit_nobody_knows_what_fits():
    assert proposals(limit_bytes=None) == []


def test_a_little_is_not_worth_a_compilation():
    assert proposals(step_s=1000.0) == []


def test_layers_that_are_not_checkpointed_have_nothing_to_keep():
    program, _ = sharded(plain_loss, {"stack": wide_stack()}, batch=(8 * ROWS, WIDTH))
    assert proposals(program) == []


def test_loops_that_stack_what_is_cheap_are_tried_without_however_little_that_is_known_to_gain():
    def body(x, w):
        return x + jnp.sin(jnp.tanh(jnp.exp(jnp.cos(jnp.sin(jnp.tanh(jnp.cos(x @ w))))))), None

    def loss(params, batch):
        return jnp.mean(lax.scan(body, batch, params["w"])[0] ** 2)

    program, _ = sharded(loss, {"w": (LAYERS, 256, 256)}, batch=(8 * ROWS, 256))
    (proposal,) = proposals(program, step_s=1000.0)
    assert proposal.plan.of(Rematerialized)
    assert proposals(program, plan=proposal.plan, step_s=1000.0) == []


def test_where_most_memory_is_left_more_is_kept_than_what_surely_gains():
    """Of a softmax is not known before it is compiled what XLA computes again beside other work."""

    def attention(x, w):
        return x + jax.nn.softmax((x @ w) @ jnp.swapaxes(x, -1, -2)) @ x

    def loss(params, batch):
        for w in params:
            batch = jax.checkpoint(attention)(batch, w)
        return jnp.mean(batch**2)

    program, _ = sharded(loss, [(64, 64)] * 4, batch=(64, 2048, 64))

    sure, more = proposals(program, plan=Plan("0"))
    (few,), (many,) = (each.plan.of(KeptActivations) for each in (sure, more))
    assert set(few.values) < set(many.values)
    assert proposals(program, plan=Plan("0"), limit_bytes=40 * MIB) == [sure], "there is no room for more"
    verify(more.plan.program(program, MESH))


def test_segments_are_smaller_where_what_they_are_given_has_to_be_on_the_host_anyway():
    def loss(params, batch):
        for each in params["alone"]:
            batch = layer(batch, each)
        return jnp.mean(batch**2)

    one = {name: shape[1:] for name, shape in wide_stack().items()}
    program, _ = sharded(loss, {"alone": [one] * 16}, batch=(8 * ROWS, WIDTH))

    def segments(limit_bytes: int, host_bytes: int) -> set[int]:
        at = {"plan": Plan("0"), "peak_bytes": 2 * GIB, "limit_bytes": limit_bytes, "host_bytes": host_bytes}
        found = proposals(program, **at)
        verify(found[-1].plan.program(program, MESH))
        return {again.segments for each in found for again in each.plan.of(RematerializedSegments)}

    (largest,) = segments(GIB // 2, host_bytes=0)
    assert segments(2 * GIB - 1, PLENTY) == {largest}
    fewer, more = sorted(segments(GIB // 2, PLENTY))
    assert fewer == largest < more
