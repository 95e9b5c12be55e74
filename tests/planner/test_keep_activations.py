"""Activations are kept where backward computes longer than it communicates, the dearest for their bytes first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Loop, Simulation, Totals
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.plan import Prediction
from jax_deepcompile.planner.recomputation import Demand, find_recomputation
from jax_deepcompile.planner.stacks import Stack
from jax_deepcompile.planner.strategies.keep_activations import Backward, Choice, KeepActivations, choose
from jax_deepcompile.planner.strategy import Proposal
from tests.planner.situations import NO_MEMORY, candidate, in_pipelines
from tests.transforms.programs import LAYERS, layer, run_stack, sharded, stack_shapes

pytestmark = pytest.mark.pure

WIDTH, ROWS = 2048, 4096


def loss(params, batch):
    return jnp.mean(run_stack(params["stack"], batch) ** 2)


def wide_stack(layers: int = LAYERS) -> dict:
    return {"up": (layers, WIDTH, 2 * WIDTH), "down": (layers, 2 * WIDTH, WIDTH), "bias": (layers, 2 * WIDTH)}


PROGRAM, MESH = sharded(loss, {"stack": wide_stack()}, batch=(8 * ROWS, WIDTH))
TURNS = find_recomputation(PROGRAM, CostModel())
(TURN,) = TURNS
PRODUCT_BYTES = 4 * LAYERS * ROWS * 2 * WIDTH
"""Of the one product that backward needs: tanh of it is computed again at no cost to speak of."""
NETWORK_BYTES_PER_S = 1e11
PLENTY = 1 << 40


def chosen(
    free_bytes: float = PLENTY, compute_s: float = 1.0, network_s: float = 0.0, stacks: tuple[Stack, ...] = ()
) -> Choice:
    return choose(TURNS, stacks, {}, free_bytes, Backward(compute_s, network_s, NETWORK_BYTES_PER_S))


def kept_bytes(choice: Choice) -> int:
    return sum(turn.kept_bytes(choice.activations.get(turn.loops, ())) for turn in TURNS)


def stack(size: int) -> Stack:
    return Stack(tuple((loop, "up") for loop in TURN.loops), size)


def test_the_product_is_kept_where_it_fits():
    assert kept_bytes(chosen(PRODUCT_BYTES)) == PRODUCT_BYTES
    assert chosen(PRODUCT_BYTES).saved_s > 0


def test_nothing_is_kept_that_does_not_fit():
    assert chosen(PRODUCT_BYTES - 1) == Choice({}, (), 0.0)


@given(st.integers(0, 4 * PRODUCT_BYTES), st.floats(0, 1), st.floats(0, 1), st.lists(st.integers(1, PRODUCT_BYTES)))
def test_what_is_kept_fits_and_what_is_saved_adds_up(free_bytes, compute_s, network_s, sizes):
    choice = chosen(free_bytes, compute_s, network_s, tuple(map(stack, sizes)))
    assert kept_bytes(choice) + sum(each.size_bytes for each in choice.stacks) <= free_bytes
    for turn in TURNS:
        demand, saved_s = Demand(turn), 0.0
        for position in choice.activations.get(turn.loops, ()):
            saved_s += demand.saved_s(position) - turn.copying_s(position)
            demand.give(position)
        assert choice.saved_s == pytest.approx(saved_s)


def test_backward_that_waits_for_the_network_has_nothing_to_compute_less_for():
    assert chosen(network_s=1.2) == Choice({}, (), 0.0)


def test_it_is_first_given_parameters_until_it_waits_for_compute():
    choice = chosen(network_s=1.2, stacks=(stack(3 * 10**10),))
    assert choice.stacks == (stack(3 * 10**10),)
    assert kept_bytes(choice) == PRODUCT_BYTES


def test_with_as_much_compute_as_network_both_are_kept():
    """Schedules do not hide everything where neither has time to spare."""
    choice = chosen(network_s=1.0, stacks=(stack(2 * 10**10),))
    assert kept_bytes(choice) == PRODUCT_BYTES
    assert choice.stacks == ()


def test_parameters_that_are_not_waited_for_are_not_kept():
    assert chosen(network_s=0.5, stacks=(stack(1),)).stacks == ()


def test_what_is_kept_already_stays():
    first = chosen()
    again = choose(TURNS, (), first.activations, PLENTY, Backward(1.0, 0.0, 1.0))
    assert again == Choice(first.activations, (), 0.0)


def test_small_products_are_computed_again():
    program, _ = sharded(loss, {"stack": stack_shapes()})
    assert choose(find_recomputation(program, CostModel()), (), {}, PLENTY, Backward(1.0, 0.0, 1.0)).saved_s < 1e-4


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
    waiting = choose(found, (), {}, PLENTY, Backward(1.0, 2.0, NETWORK_BYTES_PER_S))
    assert set(waiting.activations) == {("", "")}
    assert set(choose(found, (), {}, PLENTY, Backward(1.0, 0.0, 1.0)).activations) == {again, ("", "")}


def test_what_another_one_makes_needless_is_not_kept():
    def chain(params, batch):
        def body(x, w):
            return jnp.tanh((x @ lax.stop_gradient(w["up"])) @ lax.stop_gradient(w["down"])) + w["bias"], None

        return jnp.mean(lax.scan(jax.checkpoint(body), batch, params["stack"])[0] ** 2)

    shapes = wide_stack() | {"bias": (LAYERS, WIDTH)}
    program, _ = sharded(chain, {"stack": shapes}, batch=(8 * ROWS, WIDTH))
    (turn,) = find_recomputation(program, CostModel())
    (positions,) = choose([turn], (), {}, PLENTY, Backward(1.0, 0.0, 1.0)).activations.values()
    assert len(positions) == 1


def proposals(
    program: Program = PROGRAM, limit_bytes: int | None = PLENTY, network_s: float = 0.0, step_s: float = 0.01
) -> list[Proposal]:
    trip = Totals(0.001, network_s, gathered_bytes=1 << 20, reduced_bytes=1 << 20)
    run = Simulation(step_s, Totals(), (Loop("while", "", LAYERS, True, 1.0, trip),), (), NO_MEMORY)
    prediction = Prediction(step_s, 0.0, 0.0, 0.0, 1 << 20)
    best = candidate(program, in_pipelines(program), prediction, run)
    return list(KeepActivations().propose(program, best, Environment(MESH, "cuda", CostModel(), limit_bytes)))


def test_what_is_proposed_can_be_carried_out():
    (proposal,) = proposals()
    assert proposal.decision == "1 activations of every layer are kept, 0.31 GiB"
    verify(proposal.plan.program(PROGRAM, MESH))


def test_only_what_fits_is_proposed():
    assert len(proposals(limit_bytes=int(1.2 * PRODUCT_BYTES))) == 1
    assert proposals(limit_bytes=PRODUCT_BYTES // 2) == []


def test_without_a_limit_nobody_knows_what_fits():
    assert proposals(limit_bytes=None) == []


def test_a_little_is_not_worth_a_compilation():
    assert proposals(step_s=1000.0) == []


def test_layers_that_are_not_checkpointed_have_nothing_to_keep():
    program, _ = sharded(
        lambda params, batch: jnp.mean(run_stack(params["stack"], batch, remat=False) ** 2),
        {"stack": wide_stack()},
        batch=(8 * ROWS, WIDTH),
    )
    assert proposals(program) == []
