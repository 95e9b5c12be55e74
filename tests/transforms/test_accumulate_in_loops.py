"""Sums over microbatches that are added up in place are the same sums."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.transforms.accumulate_in_loops import AccumulateInLoops
from jax_deepcompile.transforms.decision import replace_loops
from jax_deepcompile.transforms.microbatch_loops import hidden_trip_count
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from tests.partition.steps import SCATTER, lines, shapes
from tests.schedules import additions
from tests.transforms.programs import (
    BATCH,
    MATRICES,
    STACK,
    WIDTH,
    assert_same_values,
    compiled_for_h100s,
    deeper_schedules,
    h100s,
    inner_loops,
    matrices_loss,
    outer_loops,
    run_stack,
    sharded,
    stack_loss,
)


def in_halves(loss):
    """The same layers for two microbatches: JAX's own backward pass adds up their gradients in a loop."""

    def whole(params, batch):
        def again(total, part):
            return total + loss(params, part), None

        return lax.scan(again, 0.0, jnp.stack([batch, 2 * batch]))[0]

    return whole


halves_loss = in_halves(stack_loss)
backwards_loss = in_halves(lambda params, batch: jnp.mean(run_stack(params["stack"], batch, reverse=True) ** 2))


def added_up(turn):
    """A step with a loop over microbatches that hands on what ``turn(total, gradient)`` makes of each gradient."""

    def step(params, batches):
        def one(total, batch):
            return turn(total, jax.grad(matrices_loss)(params, batch)["w"])

        parts = batches.reshape(BATCH, 2, WIDTH).swapaxes(0, 1)
        total, others = lax.scan(one, jnp.zeros_like(params["w"]), parts)
        return {"w": params["w"] - 0.1 * total}, others

    sharded_step = deepcompile.shard(step, {"fsdp": 8})
    return sharded_step.trace(shapes(MATRICES), shapes((2 * BATCH, WIDTH))).sharded, sharded_step.mesh


def stacked_sums(program) -> int:
    """Additions of whole stacks, in loops around the loops over layers."""
    return sum(
        eqn.primitive.name in ("add", "add_any") and eqn.outvars[0].aval.ndim == 3
        for loop in outer_loops(program)
        for eqn in open_jaxpr(loop.eqn.params["jaxpr"]).eqns
    )


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("loss", [halves_loss, backwards_loss], ids=["forward", "reverse"])
def test_values_stay_the_same(loss):
    program, mesh = sharded(loss, STACK)
    inside = AccumulateInLoops.apply(program, mesh, ())
    assert stacked_sums(program) > stacked_sums(inside) == 0
    assert_same_values(inside, program, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("ahead", "behind"), [(1, 1), (1, 0), (0, 2), (2, 2)])
def test_values_stay_the_same_in_place(ahead, behind):
    program, mesh = sharded(halves_loss, STACK)
    inside = AccumulateInLoops.apply(program, mesh, ())
    planned = LoopSchedule.apply(inside, mesh, deeper_schedules(inside, ahead, behind))
    assert_same_values(planned, program, mesh)


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(in_halves(matrices_loss), MATRICES, optimizer=optax.sgd(0.1))
    of_layer, of_stack = ("f32[2,16] f32[2,16] -> f32[2,16]", "f32[4,2,16] f32[4,2,16] -> f32[4,2,16]")
    forward = ["scan 2", "  add f32[] f32[] -> f32[]"]
    backward = ["scan 2", "  scan 4", f"    {SCATTER}"]

    def sums(program) -> list[str]:
        """Without those of derivatives, which some versions of JAX have and others do not."""
        text = lines(program, ("reduce_scatter", "add", "add_any"))
        return [line for line in text if line != f"    add_any {of_layer}"]

    assert sums(program) == [*forward, *backward, f"  add_any {of_stack}", f"add {of_stack}"]
    inside = AccumulateInLoops.apply(program, mesh, ())
    assert sums(inside) == [*forward, *backward, f"    add {of_layer}", f"add {of_stack}"]


@pytest.mark.pure
def test_the_stack_that_is_added_to_is_the_output():
    program, mesh = sharded(halves_loss, STACK)
    inside = AccumulateInLoops.apply(program, mesh, ())
    in_place = [len(split_body(loop.eqn).in_place) for loop in inner_loops(inside)]
    assert sum(in_place) == 3
    assert not any(split_body(loop.eqn).in_place for loop in find_loops(program))


@pytest.mark.pure
def test_one_microbatch_has_nothing_to_add():
    program, mesh = sharded(stack_loss, STACK)
    assert AccumulateInLoops.apply(program, mesh, ()) is program


@pytest.mark.pure
@pytest.mark.parametrize(
    "turn",
    [
        lambda total, gradient: (total + gradient, jnp.sum(gradient)),
        lambda total, gradient: (total + gradient, jnp.sum(total)),
        lambda total, gradient: (0.9 * total + gradient, None),
        lambda total, gradient: (total + 2 * gradient, None),
        lambda total, gradient: (jnp.maximum(total, gradient), None),
    ],
    ids=["gradient is read", "sum is read", "sum is scaled", "gradient is scaled", "no sum"],
)
def test_what_is_not_only_added_up_stays_after_the_loop(turn):
    program, mesh = added_up(turn)
    assert AccumulateInLoops.apply(program, mesh, ()) is program


@pytest.mark.pure
def test_the_users_own_sum_is_added_up_in_the_loop():
    program, mesh = added_up(lambda total, gradient: (total + gradient, None))
    assert stacked_sums(program) > stacked_sums(AccumulateInLoops.apply(program, mesh, ())) == 0


@pytest.mark.pure
def test_a_stack_that_something_else_reads_is_added_after_the_loop():
    """The loop's output goes to the sum and to another result, so it has to exist by itself."""

    def loss(params, batch):
        def again(total, part):
            _, outputs = lax.scan(lambda x, w: (jnp.tanh(x @ w), x), part, params["w"])
            return total + outputs, jnp.sum(outputs)

        parts = jnp.stack([batch, 2 * batch])
        total, sums = lax.scan(again, jnp.zeros((3, *batch.shape)), parts)
        return jnp.mean(total**2) + jnp.sum(sums)

    program, mesh = sharded(loss, {"w": (3, 16, 16)})
    inside = AccumulateInLoops.apply(program, mesh, ())
    before, after = (len(open_jaxpr(outer_loops(each)[0].eqn.params["jaxpr"]).eqns) for each in (program, inside))
    assert after == before


@pytest.mark.h100_aot
def test_no_second_stack_is_filled_and_added():
    layers, width, microbatches = 64, 1024, 4
    params, batch = {"w": (layers, width, width)}, (8 * 4 * microbatches, width)
    program, mesh = sharded(matrices_loss, params, batch, h100s(), optax.sgd(0.1), microbatches)

    def compiled(program):
        pipelined = LoopSchedule.apply(program, mesh, choose_schedules(program))
        return compiled_for_h100s(replace_loops(pipelined, mesh, {"microbatches": hidden_trip_count}), mesh)

    stack = (layers, width // 8, width)
    before, after = compiled(program), compiled(AccumulateInLoops.apply(program, mesh, ()))
    assert [additions(read(each.as_text()), stack) for each in (before, after)] == [2, 1]
    less = before.memory_analysis().temp_size_in_bytes - after.memory_analysis().temp_size_in_bytes
    assert less > 0.75 * 4 * math.prod(stack)
