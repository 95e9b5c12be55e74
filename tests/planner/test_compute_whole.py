"""Statistics of batch norms are proposed to be computed whole; of what has none nothing is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.planner.candidate import Environment, evaluate
from jax_deepcompile.planner.strategies.compute_whole import ComputeWhole
from jax_deepcompile.planner.unrolled import starting
from jax_deepcompile.transforms.compute_whole import ComputedWhole
from jax_deepcompile.transforms.prefetch import Prefetch
from tests.partition.steps import shapes
from tests.planner.situations import START, UNROLLED, candidate, situation, unrolled_loss
from tests.schedules import gathers, instructions
from tests.transforms.programs import BATCH, WIDTH, h100s
from tests.transforms.test_compute_whole import normed


@pytest.mark.pure
def test_once_for_what_has_statistics_that_are_divided():
    program, mesh = normed()
    environment = Environment(mesh, "cuda", CostModel(), None)
    (proposal,) = ComputeWhole().propose(program, candidate(program), environment)
    assert [type(each) for each in proposal.plan.decisions] == [ComputedWhole]
    assert not list(ComputeWhole().propose(program, candidate(program, proposal.plan), environment))


@pytest.mark.pure
def test_not_for_what_has_none():
    assert not list(ComputeWhole().propose(*situation(unrolled_loss, UNROLLED, CostModel())))


@pytest.mark.h100_aot
def test_on_gpus_there_are_fewer_collectives_and_the_step_is_faster():
    program, mesh = normed(h100s(), width=1024)
    environment = Environment(mesh, "cuda", CostModel(), None)
    before = evaluate(program, START, environment)
    (proposal,) = ComputeWhole().propose(program, before, environment)
    after = evaluate(program, proposal.plan, environment)
    apart, whole = (gathers(instructions(each.evaluated.module)) for each in (before, after))
    assert whole < apart
    assert after.prediction.step_s < 0.95 * before.prediction.step_s


@pytest.mark.pure
def test_gathers_start_early_by_the_names_they_have_before_anything_is_whole():
    """Of weights that a first gradient moves, for a second one to be taken there, no gather is left when they are."""

    def loss(params, x):
        for name in sorted(params):
            x = jnp.tanh(x @ params[name].astype(jnp.bfloat16))
        return jnp.mean(x.astype(jnp.float32))

    def step(params, x):
        first = jax.grad(loss)(params, x)
        moved = jax.tree.map(lambda w, g: w + g / optax.tree.norm(first), params, first)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(moved, x))

    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {f"w{layer}": (WIDTH, WIDTH) for layer in range(3)}
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
    program = deepcompile.shard(step, mesh).trace(shapes(params), x).sharded
    environment = Environment(mesh, "cuda", CostModel(), None)
    plan = START.having(ComputedWhole, [ComputedWhole(1 << 30)])
    starts = starting(program, plan, candidate(program, plan), environment, 1.25)
    assert starts.of(Prefetch)
    starts.program(program, environment.mesh)
