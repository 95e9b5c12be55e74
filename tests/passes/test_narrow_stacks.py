"""Gradients that were reduced in bfloat16 are stacked in bfloat16, where nothing reads the stacks as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.analysis.dataflow import alike
from jax_deepcompile.analysis.loops import find_loops, reduces_gradients
from jax_deepcompile.passes.accumulate_in_loops import accumulate_in_loops
from jax_deepcompile.passes.narrow_stacks import narrow_stacks
from jax_deepcompile.passes.pipeline_loops import choose_schedules, pipeline_loops
from tests.passes.programs import assert_same_work, in_two_iterations, layer, sharded, stack_loss, stack_shapes

STACK = {"stack": stack_shapes()}


def narrow_layer(x, params):
    return layer(x.astype(jnp.bfloat16), {name: leaf.astype(jnp.bfloat16) for name, leaf in params.items()})


def narrow_loss(params, batch, reverse: bool = False):
    """Layers that compute in bfloat16 with parameters in float32."""

    def body(x, params):
        return jax.checkpoint(narrow_layer)(x, params).astype(x.dtype), None

    return jnp.mean(lax.scan(body, batch, params["stack"], reverse=reverse)[0] ** 2)


def gradient_stacks(program) -> set[str]:
    """The types of the stacks that loops leave gradients in."""
    eqns = [loop.eqn for loop in find_loops(program.jaxpr) if reduces_gradients(loop.eqn)]
    return {str(var.aval.dtype) for eqn in eqns for var in eqn.outvars if var.aval.ndim == 3}


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("reverse", [False, True])
def test_values_stay_the_same(reverse):
    program, mesh = sharded(lambda params, batch: narrow_loss(params, batch, reverse), STACK)
    narrow = narrow_stacks(program, mesh)
    assert gradient_stacks(program) == {"float32"}
    assert gradient_stacks(narrow) == {"bfloat16"}
    assert_same_work(narrow, program, mesh)
    assert_same_work(pipeline_loops(narrow, mesh, choose_schedules(narrow)), program, mesh)


@pytest.mark.cpu_mesh
def test_sums_over_microbatches_stay_wide():
    program, mesh = sharded(in_two_iterations(narrow_loss), STACK)
    summed = accumulate_in_loops(program, mesh)
    inner = [loop for loop in find_loops(narrow_stacks(summed, mesh).jaxpr) if "/" in loop.name]
    before = [loop for loop in find_loops(summed.jaxpr) if "/" in loop.name]
    assert_same_work(narrow_stacks(summed, mesh), program, mesh)
    assert len(inner) == len(before)


@pytest.mark.pure
def test_what_was_never_narrow_stays():
    program, mesh = sharded(stack_loss, STACK)
    assert narrow_stacks(program, mesh) is program


@pytest.mark.pure
def test_stacks_that_a_loop_or_a_product_reads_stay_wide():
    def through_a_loop(params, batch):
        grads = jax.grad(narrow_loss)(params, batch)["stack"]["up"]
        return lax.stop_gradient(lax.scan(lambda total, g: (total + jnp.sum(g**2), None), 0.0, grads)[0])

    def through_a_product(params, batch):
        grads = jax.grad(narrow_loss)(params, batch)["stack"]["up"]
        return lax.stop_gradient(jnp.mean(jnp.einsum("lde,lfe->df", grads, grads)))

    for others in (through_a_loop, through_a_product):
        program, mesh = sharded(
            lambda params, batch, others=others: stack_loss(params, batch) + others(params, batch), STACK
        )
        loops = [loop for loop in find_loops(narrow_stacks(program, mesh).jaxpr) if reduces_gradients(loop.eqn)]
        wide = [
            var for loop in loops for var in loop.eqn.outvars if var.aval.dtype == jnp.float32 and var.aval.ndim == 3
        ]
        assert wide


@pytest.mark.pure
def test_stacks_that_are_returned_stay_wide():
    program, mesh = sharded(narrow_loss, STACK)
    closed, (loop,) = program.jaxpr, (each for each in find_loops(program.jaxpr) if reduces_gradients(each.eqn))
    stacks = [var for var in loop.eqn.outvars if var.aval.ndim == 3]
    jaxpr = open_jaxpr(closed)
    kept = [stacks.pop() if stacks and alike(stacks[-1], var) else var for var in jaxpr.outvars]
    returning = program.replace(jaxpr=type(closed)(jaxpr.replace(outvars=kept), closed_consts(closed)))
    assert len(stacks) == 0
    assert gradient_stacks(narrow_stacks(returning, mesh)) == {"float32"}
