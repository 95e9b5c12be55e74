"""Sums over microbatches that are added up in place are the same sums."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.passes.accumulate_in_loops import accumulate_in_loops
from jax_deepcompile.passes.pipeline_loops import choose_schedules, pipeline_loops
from tests.passes.programs import run, run_stack, sharded, stack_loss, stack_shapes

STACK = {"stack": stack_shapes()}


def halves_loss(params, batch):
    """The same layers for two microbatches: JAX's own backward pass adds up their gradients in a loop."""

    def again(total, part):
        return total + jnp.mean(run_stack(params["stack"], part) ** 2), None

    return lax.scan(again, 0.0, jnp.stack([batch, 2 * batch]))[0]


def backwards_loss(params, batch):
    def again(total, part):
        return total + jnp.mean(run_stack(params["stack"], part, reverse=True) ** 2), None

    return lax.scan(again, 0.0, jnp.stack([batch, 2 * batch]))[0]


def stacked_sums(program) -> int:
    """Additions of whole stacks, in loops around the loops over layers."""
    return sum(
        eqn.primitive.name in ("add", "add_any") and eqn.outvars[0].aval.ndim == 3
        for loop in find_loops(program.jaxpr)
        if "/" not in loop.name
        for eqn in open_jaxpr(loop.eqn.params["jaxpr"]).eqns
    )


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("loss", [halves_loss, backwards_loss], ids=["forward", "reverse"])
def test_values_stay_the_same(loss):
    program, mesh = sharded(loss, STACK)
    inside = accumulate_in_loops(program, mesh)
    verify(inside)
    assert stacked_sums(program) > stacked_sums(inside) == 0
    for got, expected in zip(run(inside, mesh), run(program, mesh), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("ahead", "behind"), [(1, 1), (1, 0), (0, 2), (2, 2)])
def test_values_stay_the_same_in_place(ahead, behind):
    program, mesh = sharded(halves_loss, STACK)
    inside = accumulate_in_loops(program, mesh)
    planned = pipeline_loops(inside, mesh, choose_schedules(inside, ahead, behind))
    verify(planned)
    for got, expected in zip(run(planned, mesh), run(program, mesh), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.pure
def test_the_stack_that_is_added_to_is_the_output():
    program, mesh = sharded(halves_loss, STACK)
    inside = accumulate_in_loops(program, mesh)
    in_place = [len(split_body(loop.eqn).in_place) for loop in find_loops(inside.jaxpr) if "/" in loop.name]
    assert sum(in_place) == 3
    assert not any(split_body(loop.eqn).in_place for loop in find_loops(program.jaxpr))


@pytest.mark.pure
def test_one_microbatch_has_nothing_to_add():
    program, mesh = sharded(stack_loss, STACK)
    assert accumulate_in_loops(program, mesh) is program


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

    program, _ = sharded(loss, {"w": (3, 16, 16)})
    forward = next(loop for loop in find_loops(program.jaxpr) if "/" not in loop.name)
    before = len(open_jaxpr(forward.eqn.params["jaxpr"]).eqns)
    program2, mesh = sharded(loss, {"w": (3, 16, 16)})
    after = next(loop for loop in find_loops(accumulate_in_loops(program2, mesh).jaxpr) if "/" not in loop.name)
    assert len(open_jaxpr(after.eqn.params["jaxpr"]).eqns) == before
