"""Products that a loop adds up are one product after it, whatever cell, and whatever becomes of each before."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.planner.candidate import Environment, evaluate
from jax_deepcompile.planner.strategies.products_after_loops import ProductsAfterLoops
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.products_after_loops import ProductsAfterLoop, summed_products, written_bytes
from tests.cases import examples
from tests.planner.situations import START, candidate
from tests.transforms.programs import WIDTH, h100s, outline, run, sharded

BATCH = (16, 6, WIDTH)


def recurrent(cell, start=lambda x: jnp.zeros((len(x), WIDTH), x.dtype), **options):
    """The loss of ``cell(params, h, x_t) -> h`` over time steps."""

    def loss(params, batch):
        def step(h, x):
            h = cell(params, h, x)
            return h, h

        _, y = lax.scan(step, start(batch), batch.swapaxes(0, 1), **options)
        return jnp.mean(y**2)

    return loss


def elman(p, h, x):
    return jnp.tanh(x @ p["wx"] + h @ p["wh"] + p["b"])


def gated(p, h, x):
    """As Flax's ``OptimizedLSTMCell``: one product for all gates, whose matrices are apart."""
    z = x @ p["wx"] + h @ jnp.concatenate([p["wi"], p["wo"]], -1)[:, :WIDTH] + p["b"]
    i, o = jnp.split(jnp.concatenate([z, h @ p["wh"]], -1), 2, -1)
    return jnp.tanh(i) * jax.nn.sigmoid(o)


def in_bfloat16(p, h, x):
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
    return elman(p, h, x.astype(jnp.bfloat16)).astype(h.dtype)


def of_heads(p, h, x):
    """A product with a batch of its own."""
    heads = x.reshape(len(x), 4, WIDTH // 4)
    return jnp.tanh(jnp.einsum("bhi,hij->bhj", heads, p["heads"]).reshape(x.shape) + h @ p["wh"])


SQUARE = {"wx": (WIDTH, WIDTH), "wh": (WIDTH, WIDTH), "b": (WIDTH,)}
CELLS = {
    "elman": (elman, SQUARE, 3),
    "gated": (gated, {**SQUARE, "wi": (WIDTH, WIDTH), "wo": (WIDTH, WIDTH)}, 3),
    "bfloat16": (in_bfloat16, SQUARE, 1),
    "heads": (of_heads, {"heads": (4, WIDTH // 4, WIDTH // 4), "wh": (WIDTH, WIDTH)}, 2),
}


def backward(program) -> Loop:
    return list(find_loops(program))[-1]


def after(program, mesh):
    return carry_out(program, mesh, [ProductsAfterLoop(backward(program).name)])


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(recurrent(elman), SQUARE, BATCH)
    product, add = "dot_general", "add_any"
    loop = outline(program, add)[outline(program, add).index("scan 6", 5) :]
    assert loop.count(f"  {product}") == 3
    changed = outline(after(program, mesh), add)
    behind = changed[changed.index("scan 6", 5) :]
    assert (behind.count(f"  {product}"), behind.count(product)) == (1, 2)


@pytest.mark.pure
def test_factors_that_are_slices_are_not_stacked_again():
    program, mesh = sharded(recurrent(elman), SQUARE, BATCH)
    before, made = (backward(each) for each in (program, after(program, mesh)))
    assert len(made.scan.outputs.carry) == len(before.scan.outputs.carry) - 3
    assert len(made.scan.outputs.ys) == len(before.scan.outputs.ys) + 1
    sums, stacked = written_bytes(before.eqn)
    assert (sums, stacked) == (4 * (2 * WIDTH * WIDTH + WIDTH), 4 * 2 * WIDTH)


@pytest.mark.cpu_mesh
@examples(12)
@given(st.sampled_from(sorted(CELLS)), st.booleans(), st.sampled_from([2, 6]), st.sampled_from([8, 1]))
def test_sums_stay_the_same(name, reverse, length, devices):
    cell, shapes, count = CELLS[name]
    program, mesh = sharded(recurrent(cell, reverse=reverse), shapes, (16, length, WIDTH), mesh={"fsdp": devices})
    assert devices == 1 or len(summed_products(backward(program).eqn)) == count
    for got, expected in zip(run(after(program, mesh), mesh), run(program, mesh), strict=True):
        scale = np.abs(expected.astype(np.float32)).max(initial=1e-3)
        np.testing.assert_allclose(got, expected, rtol=0, atol=(1e-2 if name == "bfloat16" else 1e-5) * scale)


def penalised(params, batch):
    """The sum so far is read in every iteration."""

    def step(carry, x):
        total, h = carry
        return (total + x.T @ h, jnp.tanh(h * total.mean())), None

    return jnp.mean(lax.scan(step, (params["w"], batch[:, 0]), batch.swapaxes(0, 1))[0][0] ** 2)


NOTHING = {
    "a sum that is read": penalised,
    "a product that is kept": lambda params, batch: jnp.mean(
        lax.scan(lambda s, x: (s + x.T @ x, x.T @ x), params["w"], batch.swapaxes(0, 1))[1] ** 2
    ),
    "sums of no product": lambda params, batch: jnp.mean(
        lax.scan(lambda s, x: (s + x.sum(0), None), params["w"], batch.swapaxes(0, 1))[0] ** 2
    ),
    "a factor of all iterations": lambda params, batch: jnp.mean(
        lax.scan(lambda s, x: (s + x[:WIDTH].T @ params["w"][: len(x)], None), params["w"], batch.swapaxes(0, 1))[0]
        ** 2
    ),
}


@pytest.mark.pure
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_is_taken_out_of_a_loop_with(name):
    program, mesh = sharded(NOTHING[name], {"w": (WIDTH, WIDTH)}, BATCH)
    loops = [loop for loop in find_loops(program) if not summed_products(loop.eqn)]
    assert loops
    with pytest.raises(errors.PlanError, match="adds up no products that nothing else reads"):
        carry_out(program, mesh, [ProductsAfterLoop(loops[0].name)])


@pytest.mark.pure
def test_it_is_proposed_where_less_is_stacked_than_summed():
    few, mesh = sharded(recurrent(elman), SQUARE, BATCH)
    environment = Environment(mesh, "cuda", CostModel(), None)
    (proposal,) = ProductsAfterLoops().propose(few, candidate(few), environment)
    assert proposal.plan.of(ProductsAfterLoop) == (ProductsAfterLoop(backward(few).name),)
    assert not list(ProductsAfterLoops().propose(few, candidate(few, proposal.plan), environment))
    many, _ = sharded(recurrent(elman), SQUARE, (8 * 64 * WIDTH, 6, WIDTH))
    assert not list(ProductsAfterLoops().propose(many, candidate(many), environment))


@pytest.mark.pure
@pytest.mark.parametrize("limit_bytes", [None, 1 << 30])
def test_what_stacks_more_than_it_reads_is_proposed_under_a_limit(limit_bytes):
    def loss(params, batch):
        def step(total, x):
            return total + jnp.sin(x).T @ jnp.cos(x), None

        return jnp.mean(params["w"] * lax.scan(step, jnp.zeros((WIDTH, WIDTH)), batch.swapaxes(0, 1))[0])

    program, mesh = sharded(loss, {"w": (WIDTH, WIDTH)}, BATCH)
    environment = Environment(mesh, "cuda", CostModel(), limit_bytes)
    found = list(ProductsAfterLoops().propose(program, candidate(program), environment))
    assert len(found) == (limit_bytes is not None)


@pytest.mark.cpu_mesh
def test_devices_that_share_a_host_do_so():
    cell, shapes, _ = CELLS["elman"]
    _, mesh = sharded(recurrent(cell), shapes, BATCH)
    step = deepcompile.shard(lambda p, x: (jax.tree.map(jnp.subtract, p, jax.grad(recurrent(cell))(p, x)), 0.0), mesh)
    params = jax.tree.map(lambda shape: jnp.full(shape, 0.1), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    plan = step.plan(params, jnp.ones(BATCH))
    assert plan.of(ProductsAfterLoop)


@pytest.mark.h100_aot
def test_on_gpus_time_steps_take_less():
    width = 1024
    shapes = {"wx": (width, width), "wh": (width, width), "b": (width,)}
    program, mesh = sharded(recurrent(elman, lambda x: jnp.zeros(x[:, 0].shape)), shapes, (64, 32, width), mesh=h100s())
    environment = Environment(mesh, "cuda", CostModel(), None)
    before = evaluate(program, START, environment)
    (proposal,) = ProductsAfterLoops().propose(program, before, environment)
    found = evaluate(program, proposal.plan, environment)
    assert found.prediction.step_s < 0.8 * before.prediction.step_s
    assert dataclasses.asdict(found.prediction)["peak_bytes"] < 1.2 * before.prediction.peak_bytes
