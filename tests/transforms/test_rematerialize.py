"""What a loop keeps and another reads is computed again to the same bits, as if its layers had been checkpointed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile import errors
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.planner.recomputation import RecomputeRegion, find_recomputation
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.rematerialize import Rematerialized, recomputable
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from tests.cases import examples
from tests.transforms.programs import (
    LAYERS,
    MATRICES,
    STACK,
    WIDTH,
    assert_same_values,
    count,
    in_two_iterations,
    inner_loops,
    layer,
    matrices_loss,
    outline,
    plain_loss,
    run,
    run_stack,
    sharded,
    stack_loss,
    stack_shapes,
)

LOOPS = ("stack @forward", "stack @backward")


def scanned(body, start=lambda batch: batch, xs=lambda stack: stack, end=lambda carry: carry, **options):
    """The loss of a scan of ``body`` that is written without checkpoint."""

    def loss(params, batch):
        carry, _ = lax.scan(body, start(batch), xs(params["stack"]), **options)
        return jnp.mean(end(carry) ** 2)

    return loss


def plain_matrices_loss(params, batch):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])[0] ** 2)


def plain_two_stacks_loss(params, batch):
    x = run_stack(params["a"], batch, remat=False)
    return jnp.mean(run_stack(params["b"], x, remat=False, reverse=True) ** 2)


def dropped(x, key, params):
    h = jnp.tanh(x @ params["up"] + params["bias"])
    return x + jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0) @ params["down"]


def dropout_layer(x, slices):
    return dropped(x, *slices), None


def dropout_by_a_key_that_is_carried(carry, params):
    key, own = jax.random.split(carry[1])
    return (dropped(carry[0], own, params), key), None


def two_streams(carry, params):
    """Neither stream is kept as it is: what backward reads is made of both."""
    x, y, count = carry
    h = jnp.tanh((x + y) @ params["up"] * (1 + count)) * jnp.cos(x - y).sum(-1, keepdims=True)
    return (y, x + h @ params["down"], count + 1), None


def inner_loop(x, params):
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ params["up"] @ params["down"]), None), x, length=2)
    return x + h, None


KEYS = jax.random.split(jax.random.key(1), LAYERS)
SCANS = {
    "layers": plain_loss,
    "reverse": scanned(lambda x, params: (layer(x, params), None), reverse=True),
    "dropout": scanned(dropout_layer, xs=lambda stack: (KEYS, stack)),
    "a carried key": scanned(
        dropout_by_a_key_that_is_carried, lambda x: (x, jax.random.key(0)), end=lambda carry: carry[0]
    ),
    "two streams": scanned(two_streams, lambda x: (x, 2 * x, jnp.int32(0)), end=lambda carry: carry[1]),
    "inner loop": scanned(inner_loop),
    "products saved": scanned(
        jax.checkpoint(lambda x, params: (layer(x, params), None), policy=jax.checkpoint_policies.dots_saveable)
    ),
}


def pairs(program: Program) -> list[Rematerialized]:
    """All that is made by one loop for another one and can be made again."""
    loops = list(find_loops(program))
    turns = [
        (ahead, behind)
        for ahead in loops
        for behind in loops
        if ahead.path[:-1] == behind.path[:-1] and ahead.path < behind.path
    ]
    return [Rematerialized(ahead.name, behind.name) for ahead, behind in turns if recomputable(program, ahead, behind)]


def regions(program: Program) -> list[RecomputeRegion]:
    return find_recomputation(program, CostModel())


def everything(program: Program) -> list[KeptActivations]:
    return [KeptActivations(*region.loops, region.names) for region in regions(program) if region.names]


def remade(program: Program, mesh) -> Program:
    return carry_out(program, mesh, pairs(program))


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(plain_matrices_loss, MATRICES)
    gather, product, reduce = "  all_gather", "  dot_general", "  reduce_scatter"
    forward = ["scan 4", gather, product, "  tanh"]
    assert outline(program, "tanh") == [*forward, "scan 4", product, reduce, gather, product]
    after = remade(program, mesh)
    again = ["scan 4", gather, product, "  tanh", product, reduce, product]
    assert outline(after, "tanh") == [*forward, *again]


@pytest.mark.pure
def test_it_is_what_checkpointed_layers_are():
    """Their products and collectives, and one stack between the loops: that of the layers' inputs."""
    mine, theirs = (sharded(loss, MATRICES) for loss in (plain_matrices_loss, matrices_loss))
    after = remade(*mine)
    for primitive in ("all_gather", "reduce_scatter", "dot_general"):
        assert count(after, primitive) == count(theirs[0], primitive)
    (region,) = regions(after)
    assert [(each.name, each.size_bytes) for each in region.residuals] == [("w input", 4 * 2 * WIDTH)]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("name", SCANS)
def test_values_stay_the_same(name):
    program, mesh = sharded(SCANS[name], STACK)
    assert [each.subjects() for each in pairs(program)] == [LOOPS]
    after = remade(program, mesh)
    assert count(after, "reduce_scatter") == count(program, "reduce_scatter")
    assert_same_values(after, program, mesh)


@pytest.mark.cpu_mesh
def test_of_two_stacks_values_stay_the_same():
    program, mesh = sharded(plain_two_stacks_loss, {"a": stack_shapes(3), "b": stack_shapes()})
    assert len(pairs(program)) == 2
    assert_same_values(remade(program, mesh), program, mesh)


@pytest.mark.cpu_mesh
def test_inside_of_another_loop_values_stay_the_same():
    program, mesh = sharded(in_two_iterations(plain_loss), STACK)
    names = {loop.name for loop in inner_loops(program)}
    (inner,) = [each for each in pairs(program) if {each.forward, each.backward} <= names]
    assert_same_values(carry_out(program, mesh, [inner]), program, mesh)


def blocks_loss(params, batch):
    """Two blocks of layers."""

    def block(x, layers):
        return lax.scan(lambda x, w: (layer(x, w), None), x, layers)[0], None

    return jnp.mean(lax.scan(block, batch, params["stack"])[0] ** 2)


BLOCKS = {"stack": {name: (2, *shape) for name, shape in stack_shapes().items()}}


def in_blocks(program: Program, mesh) -> list[Rematerialized]:
    """Layers are computed again within blocks that are."""
    (block,) = pairs(program)
    return [block, *(each for each in pairs(carry_out(program, mesh, [block])) if each != block)]


@pytest.mark.pure
def test_what_a_block_runs_again_can_be_computed_again_inside():
    program, mesh = sharded(blocks_loss, BLOCKS)
    block, inner = in_blocks(program, mesh)
    assert [inner.forward, inner.backward] == ["stack @recomputed", "stack @backward"]
    first, second = (carry_out(program, mesh, made) for made in ([block], [block, inner]))
    held = [sum(each.shared_bytes for each in regions(made)) for made in (program, first, second)]
    assert held == sorted(held, reverse=True)
    assert carry_out(program, mesh, [inner, block]).loop_names == second.loop_names
    with pytest.raises(errors.PlanError, match=r"'stack @recomputed', a loop that .* does not have"):
        carry_out(program, mesh, [inner])


@pytest.mark.cpu_mesh
def test_in_blocks_of_layers_values_stay_the_same():
    program, mesh = sharded(blocks_loss, BLOCKS)
    decisions = in_blocks(program, mesh)
    assert_same_values(carry_out(program, mesh, decisions), program, mesh)
    kept = [each for each in everything(carry_out(program, mesh, decisions)) if each.forward == decisions[1].forward]
    assert len(kept) == 1
    assert_same_values(carry_out(program, mesh, [*decisions, *kept]), program, mesh)


@pytest.mark.cpu_mesh
def test_in_every_microbatch_values_stay_the_same():
    program, mesh = sharded(plain_loss, STACK, (32, WIDTH), microbatches=2)
    (inner,) = pairs(program)
    assert_same_values(carry_out(program, mesh, [inner]), program, mesh)


@pytest.mark.cpu_mesh
def test_with_pipelined_loops_values_stay_the_same():
    program, mesh = sharded(plain_loss, STACK)
    after = remade(program, mesh)
    assert_same_values(LoopSchedule.apply(after, mesh, choose_schedules(after)), program, mesh)


@pytest.mark.cpu_mesh
def test_what_was_kept_can_be_kept_again():
    program, mesh = sharded(plain_loss, STACK)
    after = remade(program, mesh)
    (choice,) = everything(after)
    assert choice.values == ("layer dot_general", "layer tanh")
    kept = carry_out(after, mesh, [choice])
    assert count(kept, "dot_general") == count(program, "dot_general")
    assert_same_values(kept, program, mesh)


LAYER_KINDS = {
    "dense": lambda x, p: jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"],
    "relu": lambda x, p: jax.nn.relu(x @ p["up"]) @ p["down"] + x,
    "norm": lambda x, p: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3),
    "softmax": lambda x, p: jax.nn.softmax(x @ p["up"], axis=-1) @ p["down"],
}
PLACES = ("again", "device", "host")


@pytest.mark.cpu_mesh
@examples(8)
@given(
    st.lists(st.sampled_from(sorted(LAYER_KINDS)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(PLACES), min_size=8, max_size=8),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
)
def test_wherever_activations_are_values_stay_the_same(kinds, reverse, again, places, ahead, behind, pipelined):
    def body(x, params):
        for kind in kinds:
            x = LAYER_KINDS[kind](x, params)
        return x, None

    program, mesh = sharded(scanned(body, reverse=reverse), STACK)
    decisions = [*pairs(program)] if again else []
    base = carry_out(program, mesh, decisions)
    for region in regions(base):
        kept = [name for at, name in enumerate(region.names) if places[at % 8] != "again"]
        sent = [name for at, name in enumerate(region.names) if places[at % 8] == "host"]
        sent += [each.name for at, each in enumerate(region.residuals) if places[-1 - at % 8] == "host"]
        decisions += [KeptActivations(*region.loops, tuple(kept)), OffloadedActivations(*region.loops, tuple(sent))]
    if pipelined:
        depths = [LoopSchedule(loop.name, ahead, behind) for loop in find_loops(base)]
        decisions += [each if "backward" in each.loop else LoopSchedule(each.loop, ahead, 0) for each in depths]
    after = carry_out(program, mesh, decisions)
    verify(after)
    for got, expected in zip(run(after, mesh), run(program, mesh), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max(initial=1e-3))


def undefined_layer(x, params):
    noise = lax.rng_uniform(0.0, lax.stop_gradient(x.max()), x.shape)
    return jnp.tanh(x * noise @ params["up"]) @ params["down"], None


def linear_loss(params, batch):
    """Backward reads layers' inputs alone."""
    return jnp.mean(lax.scan(lambda x, w: (x @ w, None), batch, params["w"])[0] ** 2)


NOTHING = {
    "checkpointed already": (stack_loss, STACK),
    "random bits that nobody gets again": (scanned(undefined_layer), STACK),
    "inputs alone": (linear_loss, MATRICES),
}


@pytest.mark.pure
@pytest.mark.parametrize("name", NOTHING)
def test_there_is_nothing_to_compute_again(name):
    program, mesh = sharded(*NOTHING[name])
    assert pairs(program) == []
    forward, backward = (loop.name for loop in find_loops(program))
    with pytest.raises(errors.PlanError, match=f"nothing that '{backward}' reads of '{forward}' can be computed again"):
        carry_out(program, mesh, [Rematerialized(forward, backward)])


@pytest.mark.pure
def test_what_a_layer_prints_is_printed_once():
    def body(x, params):
        h = jnp.tanh(x @ params["up"])
        jax.debug.print("{}", h.sum())
        return h @ params["down"], None

    program, mesh = sharded(scanned(body), STACK)
    after = remade(program, mesh)
    assert count(after, "dot_general") > count(program, "dot_general")
    assert [eqn.primitive.name for eqn in equations(after.jaxpr)].count("debug_print") == 1


@pytest.mark.pure
def test_what_values_are_called_does_not_depend_on_what_is_gathered_for_all_layers():
    """Nothing is left of what was made for backward alone: names count what a body has."""

    def swish(x, params):
        return x + jax.nn.silu(x @ params["up"] + params["bias"]) @ params["down"], None

    program, mesh = sharded(scanned(swish), {"stack": stack_shapes()})
    (pair,) = pairs(program)
    again = carry_out(program, mesh, [pair])
    stacked = carry_out(program, mesh, [pair, *(StackCollectives(loop, ("stack/bias",)) for loop in LOOPS)])
    (names,) = [each.names for each in regions(again)]
    assert [each.names for each in regions(stacked)] == [names]
    loops = {loop.name: loop for loop in find_loops(program)}
    found = recomputable(program, loops[pair.forward], loops[pair.backward])
    assert found is not None
    assert found.names
    assert set(found.names) <= set(names)
