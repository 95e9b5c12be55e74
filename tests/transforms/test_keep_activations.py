"""What the forward loop leaves of its activations gives the same bits, and is computed by it alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.lowering.compile import peak_bytes
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import RecomputeRegion, find_recomputation
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.offload_values import OffloadedValues
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.save_gathered import SavedGathers
from tests.cases import examples, in_turn
from tests.partition.steps import shapes, training_step
from tests.schedules import instructions, product_elements
from tests.transforms.programs import (
    LAYERS,
    MATRICES,
    OPERATIONS,
    POLICIES,
    STACK,
    assert_same_values,
    backwards_loss,
    compiled_for_h100s,
    count,
    h100s,
    in_two_iterations,
    inner_loops,
    layer,
    layers_loss,
    loop_names,
    matrices_loss,
    outline,
    run,
    run_stack,
    sharded,
    stack_loss,
    stack_shapes,
    two_products_loss,
    two_stacks_loss,
)

LOOPS = ("stack @forward", "stack @backward")


def noisy_loss(params, batch):
    """Layers that drop some of their inputs, each by a key of its own."""

    @jax.checkpoint
    def layer(x, layer):
        params, key = layer
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        h = jnp.tanh(jnp.where(kept, x, 0) @ params["up"] + params["bias"])
        return x + h @ params["down"], None

    keys = jax.random.split(jax.random.key(1), LAYERS)
    return jnp.mean(lax.scan(layer, batch, (params["stack"], keys))[0] ** 2)


def inner_loop_loss(params, batch):
    """Layers with a loop of their own."""

    @jax.checkpoint
    def layer(x, params):
        h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ params["up"] @ params["down"]), None), x, length=2)
        return x + h, None

    return jnp.mean(lax.scan(layer, batch, params["stack"])[0] ** 2)


def turns(program: Program) -> list[RecomputeRegion]:
    return find_recomputation(program, CostModel())


def everything(program: Program) -> list[KeptActivations]:
    """All that any backward loop computes again."""
    return [KeptActivations(*turn.loops, turn.names) for turn in turns(program)]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("loss", "params", "products", "pipelined"),
    in_turn(
        {
            "forward": (stack_loss, STACK, LAYERS),
            "reverse": (backwards_loss, STACK, LAYERS),
            "two stacks": (two_stacks_loss, {"a": stack_shapes(3), "b": stack_shapes()}, LAYERS + 3),
            "random": (noisy_loss, STACK, LAYERS),
            "inner loop": (inner_loop_loss, STACK, 0),
        },
        {"plain": False, "pipelined": True},
    ),
)
def test_values_stay_the_same(loss, params, products, pipelined):
    program, mesh = sharded(loss, params)
    kept = KeptActivations.apply(program, mesh, everything(program))
    if pipelined:
        kept = LoopSchedule.apply(kept, mesh, choose_schedules(program))
    assert count(kept, "dot_general") == count(program, "dot_general") - products
    assert count(kept, "reduce_scatter") == count(program, "reduce_scatter")
    assert_same_values(kept, program, mesh)


@pytest.mark.cpu_mesh
def test_inside_of_another_loop_values_stay_the_same():
    program, mesh = sharded(in_two_iterations(stack_loss), STACK)
    inner = loop_names(program, inner_loops)
    nested = [choice for choice in everything(program) if choice.forward in inner]
    assert {turn.times for turn in turns(program)} == {1, 2}
    kept = KeptActivations.apply(program, mesh, nested)
    assert count(kept, "dot_general") == count(program, "dot_general") - 2 * LAYERS
    assert_same_values(kept, program, mesh)


def unrolled_loss(params, batch):
    """Layers one by one, each with a stack's slices."""
    x = batch
    for index in range(LAYERS):
        x = jax.checkpoint(layer)(x, jax.tree.map(lambda leaf, index=index: leaf[index], params["stack"]))
    return jnp.mean(x**2)


@pytest.mark.cpu_mesh
def test_outside_of_loops_values_stay_the_same():
    program, mesh = sharded(unrolled_loss, STACK)
    (choice,) = everything(program)
    assert (choice.forward, choice.backward) == ("", "")
    kept = KeptActivations.apply(program, mesh, [choice])
    assert count(kept, "dot_general") == count(program, "dot_general") - LAYERS
    assert count(kept, "all_gather") <= count(program, "all_gather")
    assert_same_values(kept, program, mesh)


@pytest.mark.cpu_mesh
def test_inside_of_an_iteration_values_stay_the_same():
    program, mesh = sharded(in_two_iterations(unrolled_loss), STACK)
    inside = [choice for choice in everything(program) if choice.forward == choice.backward]
    assert {(turn.layers, turn.times) for turn in turns(program) if turn.loops[0] == turn.loops[1]} == {(1, 2)}
    kept = KeptActivations.apply(program, mesh, inside)
    assert count(kept, "dot_general") < count(program, "dot_general")
    assert_same_values(kept, program, mesh)


@pytest.mark.pure
def test_what_xla_merges_by_itself_is_no_matter():
    """Twice the same product, with no barrier between."""

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + jnp.mean(jnp.sin(batch @ params["w"]))

    program, _ = sharded(loss, {"w": (16, 32)})
    assert not any(turn.activations for turn in turns(program))


@pytest.mark.cpu_mesh
def test_beside_parameters_that_stay_gathered_values_stay_the_same():
    program, mesh = sharded(stack_loss, STACK)
    saved = SavedGathers.apply(program, mesh, [SavedGathers(*LOOPS, ("stack/up", "stack/bias"))])
    assert everything(saved) == everything(program)
    assert_same_values(KeptActivations.apply(saved, mesh, everything(saved)), program, mesh)


@pytest.mark.cpu_mesh
def test_of_loops_in_a_checkpointed_loop_what_is_kept_stays_the_same_and_so_do_names():
    """The inner loop is in both bodies of the outer one: once forward, and once more, beside its own backward loop."""

    def block(x, stack):
        return run_stack(stack, x), None

    def loss(params, batch):
        blocks = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params["stack"])
        return jnp.mean(lax.scan(jax.checkpoint(block), batch, blocks)[0] ** 2)

    program, mesh = sharded(loss, STACK)
    (choice,) = [KeptActivations(*turn.loops, turn.names) for turn in turns(program) if turn.names]
    after = carry_out(program, mesh, [choice])
    assert after.loop_names == program.loop_names
    assert_same_values(after, program, mesh)


@pytest.mark.cpu_mesh
@examples(8)
@given(
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4),
    st.sampled_from(sorted(POLICIES)),
    st.sets(st.integers(0, 40), min_size=1),
    st.booleans(),
)
def test_whatever_is_kept_of_whatever_layers_values_stay_the_same(operations, policy, positions, reverse):
    program, mesh = sharded(layers_loss(operations, policy, reverse), STACK)
    choices = [
        KeptActivations(*turn.loops, tuple({turn.names[each % len(turn.names)] for each in positions}))
        for turn in turns(program)
    ]
    kept = KeptActivations.apply(program, mesh, choices)
    verify(kept)
    tolerance = 2e-2 if "bf16" in operations else 1e-4
    for got, expected in zip(run(kept, mesh), run(program, mesh), strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max(initial=1e-3))


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(matrices_loss, MATRICES)
    gather, product, reduce = "  all_gather", "  dot_general", "  reduce_scatter"
    forward, backward = ["scan 4", gather, product], [product, reduce, product]
    assert outline(program) == [*forward, "scan 4", gather, product, *backward]
    kept = KeptActivations.apply(program, mesh, everything(program))
    assert outline(kept) == [*forward, "scan 4", gather, *backward]


@pytest.mark.pure
def test_some_of_them_is_enough():
    program, mesh = sharded(stack_loss, STACK)
    kept = KeptActivations.apply(program, mesh, [KeptActivations(*LOOPS, ("layer dot_general",))])
    assert count(kept, "dot_general") == count(program, "dot_general") - LAYERS
    assert count(kept, "tanh") == count(program, "tanh")


@pytest.mark.pure
def test_a_loop_of_no_layers_computes_nothing_again():
    program, _ = sharded(stack_loss, {"stack": stack_shapes(0)})
    assert not any(turn.activations for turn in turns(program))


@pytest.mark.pure
def test_layers_that_are_not_checkpointed_compute_nothing_again():
    program, mesh = sharded(lambda params, batch: jnp.mean(run_stack(params["stack"], batch, remat=False) ** 2), STACK)
    kept = KeptActivations.apply(program, mesh, everything(program))
    assert count(kept, "dot_general") == count(program, "dot_general")


@pytest.mark.pure
def test_each_of_two_stacks_turns_by_itself():
    program, _ = sharded(two_stacks_loss, {"a": stack_shapes(), "b": stack_shapes()})
    assert sorted(turn.loops for turn in turns(program)) == [
        ("a @forward", "a @backward"),
        ("b @forward", "b @backward"),
    ]


@pytest.mark.h100_aot
def test_the_backward_loop_computes_less_and_a_stack_of_memory_holds_it():
    layers, width, rows = 6, 1024, 8192
    params = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    program, mesh = sharded(two_products_loss, params, (8 * rows, width), h100s(), optax.sgd(0.1))
    (turn,) = turns(program)
    sizes = [activation.size_bytes for activation in turn.activations]
    up = sizes.index(rows * 4 * width * 4)

    def compiled(choices):
        kept = KeptActivations.apply(program, mesh, choices)
        return compiled_for_h100s(LoopSchedule.apply(kept, mesh, choose_schedules(kept)), mesh)

    before, after = compiled([]), compiled([KeptActivations(*turn.loops, (turn.names[up],))])
    computed = [product_elements(instructions(read(each.as_text()))) for each in (before, after)]
    assert computed[1] < computed[0]
    more = peak_bytes(after.memory_analysis()) - peak_bytes(before.memory_analysis())
    assert (layers - 1) * sizes[up] < more < (layers + 2) * sizes[up]


@pytest.mark.h100_aot
def test_layers_written_one_by_one_are_planned_to_compute_less():
    """Four checkpointed layers of two products: what memory does not hold is on the host meanwhile."""
    layers, width, rows = 4, 2048, 8192

    def loss(params, x):
        @jax.checkpoint
        def layer(x, up, down):
            return jnp.tanh(jnp.tanh(x @ up) @ down)

        for index in range(layers):
            x = layer(x, params[f"up{index}"], params[f"down{index}"])
        return jnp.mean(x**2)

    shape = {f"up{index}": (width, 4 * width) for index in range(layers)}
    params = shapes(shape | {f"down{index}": (4 * width, width) for index in range(layers)})
    optimizer = optax.sgd(0.1)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}

    def plan(limit: str) -> Plan:
        step = deepcompile.shard(
            training_step(loss, optimizer), h100s(), memory_limit=limit, passes=(deepcompile.KeepActivations(),)
        )
        return step.trace(state, shapes((8 * rows, width))).plan()

    roomy, tight = plan("72GiB"), plan("2.7GiB")
    assert roomy.prediction is not None
    assert tight.prediction is not None
    (choice,) = roomy.of(KeptActivations)
    assert (choice.forward, choice.backward) == ("", "")
    assert not roomy.of(OffloadedValues)
    assert tight.of(OffloadedValues)
    assert tight.prediction.peak_bytes < roomy.prediction.peak_bytes
    assert tight.prediction.step_s > roomy.prediction.step_s
