"""What stays gathered: the same bits, fewer gathers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.analysis.gathers import hoistable_gathers
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.passes.pipeline_loops import choose_schedules, pipeline_loops
from jax_deepcompile.passes.unshard import keep_over_microbatches, keep_until_backward, regathers
from tests.partition.steps import shapes
from tests.passes.programs import BATCH, WIDTH, count, layer, run, sharded, stack_loss, stack_shapes

MICROBATCHES = 4


def unrolled_loss(params, batch):
    x = batch
    for index in range(3):
        x = jax.checkpoint(layer)(x, params[f"layer{index}"])
    return jnp.mean(x**2)


UNROLLED = {f"layer{index}": {k: v[1:] for k, v in stack_shapes().items()} for index in range(3)}


def accumulating(loss, params):
    """A step whose user accumulates gradients in a loop over microbatches."""
    optimizer = optax.sgd(0.1)

    def step(state, batches):
        def one(total, batch):
            value, gradients = jax.value_and_grad(loss)(state["params"], batch)
            return jax.tree.map(jnp.add, total, gradients), value

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        gradients, values = lax.scan(one, zeros, batches.reshape(BATCH, MICROBATCHES, WIDTH).swapaxes(0, 1))
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, values.mean()

    params = shapes(params)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    sharded_step = deepcompile.shard(step, {"fsdp": 8})
    traced = sharded_step.trace(state, shapes((BATCH * MICROBATCHES, WIDTH)))
    return traced.sharded, sharded_step.mesh


def assert_same(program, planned, mesh):
    verify(planned)
    for got, expected in zip(run(planned, mesh), run(program, mesh), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.cpu_mesh
def test_straight_line_parameters_stay_gathered_until_the_backward():
    program, mesh = sharded(unrolled_loss, UNROLLED)
    jaxpr = open_jaxpr(program.jaxpr)
    pairs = regathers(jaxpr, jaxpr.invars)
    assert pairs
    kept = keep_until_backward(jaxpr, jaxpr.invars, {again.position for _, again in pairs})
    planned = program.replace(jaxpr=type(program.jaxpr)(kept, closed_consts(program.jaxpr)))
    assert count(planned, "all_gather") == count(program, "all_gather") - len(pairs)
    assert_same(program, planned, mesh)


@pytest.mark.cpu_mesh
def test_only_the_chosen_stay():
    program, mesh = sharded(unrolled_loss, UNROLLED)
    jaxpr = open_jaxpr(program.jaxpr)
    pairs = regathers(jaxpr, jaxpr.invars)
    kept = keep_until_backward(jaxpr, jaxpr.invars, {pairs[0][1].position})
    planned = program.replace(jaxpr=type(program.jaxpr)(kept, closed_consts(program.jaxpr)))
    assert count(planned, "all_gather") == count(program, "all_gather") - 1
    assert_same(program, planned, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_layers_stay_gathered_over_all_microbatches(layers):
    program, mesh = accumulating(stack_loss, {"stack": stack_shapes()})
    schedules = [
        dataclasses.replace(
            schedule,
            last_layers=layers + 1 if not schedule.delay_layers else schedule.last_layers,
            first_layers=max(layers, 1) if schedule.delay_layers else 0,
        )
        for schedule in choose_schedules(program)
    ]
    pipelined = pipeline_loops(program, mesh, schedules)
    (outer,) = (loop for loop in find_loops(pipelined.jaxpr) if "/" not in loop.name)
    candidates = hoistable_gathers(outer.eqn)
    planned = keep_over_microbatches(pipelined, mesh, {outer.name: range(len(candidates))})
    before, after = count(program, "all_gather"), count(planned, "all_gather")
    kept_leaves = 3 * layers
    assert before - after >= kept_leaves * (2 * MICROBATCHES - 1)
    assert count(planned, "reduce_scatter") == count(program, "reduce_scatter")
    assert_same(program, planned, mesh)


@pytest.mark.pure
def test_nothing_chosen_changes_nothing():
    program, mesh = accumulating(stack_loss, {"stack": stack_shapes()})
    assert keep_over_microbatches(program, mesh, {}) is program
    assert keep_over_microbatches(program, mesh, {"scan.0": ()}) is program


@pytest.mark.pure
def test_what_a_loop_changes_is_gathered_in_it():
    def moving(params, batch):
        def body(weights, row):
            return weights * 0.9, jnp.mean((row @ weights) ** 2)

        return lax.scan(body, params["w"], batch)[1].mean()

    program, _ = accumulating(lambda params, batch: moving(params, batch[None]), {"w": (WIDTH, WIDTH)})
    for loop in find_loops(program.jaxpr):
        body = open_jaxpr(loop.eqn.params["jaxpr"])
        for gather in hoistable_gathers(loop.eqn):
            assert gather.source in body.invars


@pytest.mark.pure
def test_gathers_of_different_parameters_are_not_the_same():
    program, _ = sharded(lambda p, x: jnp.mean((x @ p["a"] @ p["b"]) ** 2), {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH)})
    jaxpr = open_jaxpr(program.jaxpr)
    for first, again in regathers(jaxpr, jaxpr.invars):
        assert first.source is again.source
