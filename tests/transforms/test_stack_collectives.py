"""Collectives of whole stacks compute the same bits as those of their layers, in fewer collectives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.stacks import sliced_gathers, stacked_reductions
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.hlo.types import leaves
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.stack_collectives import StackCollectives, slice_names, stacked_names
from tests.cases import in_turn
from tests.partition.steps import GATHER, SCATTER, lines, shapes, training_step
from tests.transforms.programs import (
    LAYERS,
    MATRICES,
    STACK,
    WIDTH,
    assert_same_values,
    count,
    halves_loss,
    keeping_gathered,
    loop_names,
    matrices_loss,
    run_stack,
    sharded,
    stack_loss,
    stack_shapes,
)

WHOLE, BY_LAYER = 1 << 30, 0


def two_stacks_loss(params, batch):
    return jnp.mean(run_stack(params["b"], run_stack(params["a"], batch), reverse=True) ** 2)


def unshared_loss(params, batch):
    """Every layer reads a stack twice, and adds up what it gathered."""

    def layer(x, w):
        return jnp.tanh(x @ w) @ w.T, jnp.sum(w)

    x, sums = lax.scan(jax.checkpoint(layer), batch, params["w"])
    return jnp.mean(x**2) + jnp.sum(sums)


def everything(program) -> list[StackCollectives]:
    return [
        StackCollectives(loop.name, tuple(slice_names(program, loop)), tuple(stacked_names(program, loop)))
        for loop in find_loops(program)
    ]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("loss", "params", "at_once_bytes"),
    in_turn(
        {
            "one stack": (stack_loss, STACK),
            "two, one backwards": (two_stacks_loss, {"a": stack_shapes(), "b": stack_shapes(3)}),
            "nested": (halves_loss, STACK),
            "read twice": (unshared_loss, {"w": (LAYERS, WIDTH, WIDTH)}),
        },
        {"whole": WHOLE, "by layer": BY_LAYER},
    ),
)
def test_values_stay_the_same(loss, params, at_once_bytes):
    program, mesh = sharded(loss, params)
    outside = StackCollectives.apply(program, mesh, everything(program), at_once_bytes)
    assert_same_values(outside, program, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 4}, {"data": 4, "fsdp": 2}], ids=str)
def test_values_stay_the_same_on_two_axes(mesh):
    program, devices = sharded(stack_loss, STACK, mesh=mesh)
    outside = StackCollectives.apply(program, devices, everything(program))
    assert_same_values(outside, program, devices)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("at_once_bytes", "gathers"),
    [(WHOLE, ["all_gather fsdp: f32[4,2,16] -> f32[4,16,16]"]), (BY_LAYER, ["scan 4", f"  {GATHER}"])],
)
def test_before_and_after(at_once_bytes, gathers):
    program, mesh = sharded(matrices_loss, MATRICES)
    moves = ("all_gather", "reduce_scatter", "tanh")
    layers = ["scan 4", "  tanh f32[2,16] -> f32[2,16]"]
    assert lines(program, moves) == [layers[0], f"  {GATHER}", layers[1]] * 2 + [f"  {SCATTER}"]
    outside = StackCollectives.apply(program, mesh, everything(program), at_once_bytes)
    reduction = "reduce_scatter fsdp: f32[4,16,16] -> f32[4,2,16]"
    assert lines(outside, moves) == [*gathers, *layers, *gathers, *layers, reduction]


@pytest.mark.pure
def test_one_collective_a_stack():
    program, mesh = sharded(stack_loss, STACK)
    assert (count(program, "all_gather"), count(program, "reduce_scatter")) == (2 * 3 * LAYERS, 3 * LAYERS)
    outside = StackCollectives.apply(program, mesh, everything(program))
    assert (count(outside, "all_gather"), count(outside, "reduce_scatter")) == (2 * 3, 3)
    inside = [inner.primitive.name for loop in find_loops(outside) for inner in loop.eqn.params["jaxpr"].eqns]
    assert not {"all_gather", "reduce_scatter"} & set(inside)


@pytest.mark.pure
def test_large_stacks_are_gathered_layer_by_layer_before_the_loop():
    program, mesh = sharded(stack_loss, STACK)
    outside = StackCollectives.apply(program, mesh, everything(program), BY_LAYER)
    assert count(outside, "all_gather") == count(program, "all_gather")
    assert loop_names(outside) == loop_names(program)
    assert not any(sliced_gathers(loop.eqn) for loop in find_loops(outside))


@pytest.mark.pure
@pytest.mark.parametrize("at_once_bytes", [WHOLE, BY_LAYER])
def test_whole_stacks_are_gathered_once_for_all_runs_of_their_loop(at_once_bytes):
    program, mesh = sharded(halves_loss, STACK)
    outside = StackCollectives.apply(program, mesh, everything(program), at_once_bytes)
    once = keeping_gathered(outside, mesh)
    trips = 1 if at_once_bytes else LAYERS
    assert count(outside, "all_gather") == 2 * 2 * 3 * trips
    assert count(once, "all_gather") == 2 * 3 * trips


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("at_once_bytes", [WHOLE, BY_LAYER])
def test_the_rest_of_the_loop_can_still_be_pipelined(at_once_bytes):
    program, mesh = sharded(halves_loss, STACK)
    some = [
        dataclasses.replace(each, gathers=each.gathers[:1], reductions=each.reductions[:1])
        for each in everything(program)
    ]
    outside = StackCollectives.apply(program, mesh, some, at_once_bytes)
    planned = keeping_gathered(LoopSchedule.apply(outside, mesh, choose_schedules(outside)), mesh)
    assert count(planned, "all_gather") < count(program, "all_gather")
    assert_same_values(planned, program, mesh)


@pytest.mark.pure
def test_a_gradient_is_called_as_the_parameter_that_it_updates():
    program, _ = sharded(two_stacks_loss, {"a": stack_shapes(), "b": stack_shapes(3)})
    for loop in find_loops(program):
        assert set(stacked_names(program, loop)) in (set(), set(slice_names(program, loop)))
    assert [len(stacked_names(program, loop)) for loop in find_loops(program)] == [0, 0, 3, 3]


@pytest.mark.pure
def test_gathers_of_the_carry_and_of_constants_stay_in_the_loop():
    def loss(params, batch):
        def layer(carry, _):
            x, w = carry
            return (jnp.tanh(x @ w @ params["v"]), 0.9 * w), None

        return jnp.mean(lax.scan(layer, (batch, params["w"]), None, length=3)[0][0] ** 2)

    program, _ = sharded(loss, {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)})
    forward = next(loop for loop in find_loops(program) if not loop.reverse)
    assert sliced_gathers(forward.eqn) == ()


@pytest.mark.pure
def test_a_reduction_that_something_else_reads_stays_in_the_loop():
    def loss(params, batch):
        def layer(x, w):
            y = jnp.tanh(x @ w)
            mean = jnp.mean(y)
            return y * (1 + mean), mean

        x, means = lax.scan(layer, batch, params["w"])
        return jnp.mean(x**2) + jnp.sum(means)

    program, _ = sharded(loss, {"w": (LAYERS, WIDTH, WIDTH)})
    forward = next(loop for loop in find_loops(program) if not loop.reverse)
    assert stacked_reductions(forward.eqn) == ()


@pytest.mark.h100_aot
def test_small_parameters_have_no_collective_in_the_loop():
    """Biases of 8 KiB beside matrices of 16 MiB, on 8 H100s."""
    width = 2048
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))

    def loss(params, x):
        def layer(x, params):
            return jnp.tanh(x @ params["w"] + params["b"]), None

        return jnp.mean(lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    params, optimizer = shapes({"w": (6, width, width), "b": (6, width)}), optax.sgd(0.1)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    step = deepcompile.shard(training_step(loss, optimizer), mesh, passes=(deepcompile.PipelineLoops(),))
    module = read(step.lower(state, shapes((64, width))).compile().as_text() or "")
    loops = [each for body in module.computations.values() for each in body.instructions if each.opcode == "while"]
    inside = [each for loop in loops for each in module.body(loop).instructions]
    moved = [each for each in inside if each.opcode.removesuffix("-start") in ("all-gather", "reduce-scatter")]
    assert moved
    assert all(array.bytes >= width * width // 8 for each in moved for _, array in leaves(each.shape))
