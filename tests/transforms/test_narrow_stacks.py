"""Gradients that were reduced in bfloat16 are stacked in bfloat16, where nothing reads the stacks as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.analysis.dataflow import alike
from jax_deepcompile.analysis.loops import find_loops, reduces_gradients
from jax_deepcompile.transforms.accumulate_in_loops import AccumulateInLoops
from jax_deepcompile.transforms.narrow_stacks import NarrowStacks
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from tests.partition.steps import SUM, lines, shapes
from tests.transforms.programs import (
    BATCH,
    MATRICES,
    STACK,
    WIDTH,
    assert_same_work,
    compiled_for_h100s,
    h100s,
    in_two_iterations,
    layer,
    loop_names,
    sharded,
    stack_loss,
)


def narrow_layer(x, params):
    return layer(x.astype(jnp.bfloat16), {name: leaf.astype(jnp.bfloat16) for name, leaf in params.items()})


def narrow_loss(params, batch, reverse: bool = False):
    """Layers that compute in bfloat16 with parameters in float32."""

    def body(x, params):
        return jax.checkpoint(narrow_layer)(x, params).astype(x.dtype), None

    return jnp.mean(lax.scan(body, batch, params["stack"], reverse=reverse)[0] ** 2)


def narrow_matrices_loss(params, batch):
    def body(x, w):
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    return jnp.mean(lax.scan(body, batch.astype(jnp.bfloat16), params["w"])[0].astype(jnp.float32) ** 2)


def gradient_stacks(program) -> set[str]:
    """The types of the stacks that loops leave gradients in."""
    eqns = [loop.eqn for loop in find_loops(program) if reduces_gradients(loop.eqn)]
    return {str(var.aval.dtype) for eqn in eqns for var in eqn.outvars if var.aval.ndim == 3}


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("reverse", [False, True])
def test_values_stay_the_same(reverse):
    program, mesh = sharded(lambda params, batch: narrow_loss(params, batch, reverse), STACK)
    narrow = NarrowStacks.apply(program, mesh, ())
    assert gradient_stacks(program) == {"float32"}
    assert gradient_stacks(narrow) == {"bfloat16"}
    assert_same_work(narrow, program, mesh)
    assert_same_work(LoopSchedule.apply(narrow, mesh, choose_schedules(narrow)), program, mesh)


@pytest.mark.cpu_mesh
def test_sums_over_microbatches_stay_wide():
    program, mesh = sharded(in_two_iterations(narrow_loss), STACK)
    summed = AccumulateInLoops.apply(program, mesh, ())
    narrow = NarrowStacks.apply(summed, mesh, ())
    assert_same_work(narrow, program, mesh)
    assert loop_names(narrow) == loop_names(summed)


@pytest.mark.pure
def test_before_and_after():
    def around_loops(program) -> list[str]:
        text = lines(program, ("dot_general", "psum", "convert_element_type", "add"))
        return [line for line in text if not line.startswith(" ")]

    program, mesh = sharded(narrow_matrices_loss, MATRICES, optimizer=optax.sgd(0.1))
    narrowed, widened = (
        "convert_element_type " + types for types in ("f32[2,16] -> bf16[2,16]", "bf16[2,16] -> f32[2,16]")
    )
    loops = [narrowed, "scan 4", widened, SUM, narrowed, "scan 4"]
    update = "add f32[4,2,16] f32[4,2,16] -> f32[4,2,16]"
    assert around_loops(program) == [*loops, update]
    stack = "convert_element_type bf16[4,2,16] -> f32[4,2,16]"
    assert around_loops(NarrowStacks.apply(program, mesh, ())) == [*loops, stack, update]


@pytest.mark.pure
def test_what_was_never_narrow_stays():
    program, mesh = sharded(stack_loss, STACK)
    assert NarrowStacks.apply(program, mesh, ()) is program


@pytest.mark.pure
@pytest.mark.parametrize(
    ("update", "stays"),
    [
        (lambda w, gradient: w - gradient, False),
        (lambda w, gradient: w - gradient @ jnp.eye(WIDTH), True),
        (lambda w, gradient: w - jnp.einsum("lde,lfe->ldf", gradient, gradient), True),
    ],
    ids=["elements", "product", "gather"],
)
def test_only_stacks_that_are_read_by_elements_are_narrow(update, stays):
    def step(params, batch):
        return {"w": update(params["w"], jax.grad(narrow_matrices_loss)(params, batch)["w"])}

    sharded_step = deepcompile.shard(step, {"fsdp": 8})
    program = sharded_step.trace(shapes(MATRICES), shapes((BATCH, WIDTH))).sharded
    assert gradient_stacks(program) == {"float32"}
    assert (NarrowStacks.apply(program, sharded_step.mesh, ()) is program) == stays


@pytest.mark.pure
def test_stacks_that_are_returned_stay_wide():
    program, mesh = sharded(narrow_loss, STACK)
    closed, (loop,) = program.jaxpr, (each for each in find_loops(program) if reduces_gradients(each.eqn))
    stacks = [var for var in loop.eqn.outvars if var.aval.ndim == 3]
    jaxpr = open_jaxpr(closed)
    kept = [stacks.pop() if stacks and alike(stacks[-1], var) else var for var in jaxpr.outvars]
    returning = program.replace(jaxpr=type(closed)(jaxpr.replace(outvars=kept), closed_consts(closed)))
    assert len(stacks) == 0
    assert gradient_stacks(NarrowStacks.apply(returning, mesh, ())) == {"float32"}


@pytest.mark.h100_aot
@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
def test_the_stack_takes_half_the_memory(pipelined):
    layers, width = 64, 1024
    params, batch = {"w": (layers, width, width)}, (64, width)
    program, mesh = sharded(narrow_matrices_loss, params, batch, h100s(), optax.sgd(0.1))

    def temporary_bytes(program) -> int:
        planned = LoopSchedule.apply(program, mesh, choose_schedules(program) if pipelined else ())
        return compiled_for_h100s(planned, mesh).memory_analysis().temp_size_in_bytes

    less = temporary_bytes(program) - temporary_bytes(NarrowStacks.apply(program, mesh, ()))
    half_a_stack = 2 * layers * width * width // 8
    assert 0.75 * half_a_stack < less < 1.25 * half_a_stack
