"""Which inputs a program's results carry on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_deepcompile.ir.lineage import lineage
from jax_deepcompile.ir.traversal import inline_calls

pytestmark = pytest.mark.pure

W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ONE_DEVICE = AbstractMesh((1,), ("a",))


def carried(function, *args) -> list[set[int]]:
    """Positions of the inputs that each result carries on."""
    closed = inline_calls(jax.make_jaxpr(function)(*args))
    count = len(closed.jaxpr.invars)
    return [{position for position in range(count) if bits >> position & 1} for bits in lineage(closed).carried]


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def in_a_scan(w, x):
    return lax.scan(lambda w, _: (w - 0.1 * jax.grad(loss)(w, x), w[0]), w, length=3)


def in_a_while(w, x):
    return lax.fori_loop(0, x[0, 0].astype(int), lambda _, w: w - jax.grad(loss)(w, x), w)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w, x: w - 0.1 * jax.grad(loss)(w, x), [{0}]),
        (lambda w, x: jnp.where(x > 0, w, x).astype(jnp.bfloat16), [{0, 1}]),
        (lambda w, x: jnp.concatenate([x[:2], w[:-2]]), [{0, 1}]),
        (lambda w, x: lax.dynamic_update_slice(w, x[:1], (0, 0)), [{0, 1}]),
        (lambda w, x: w.at[0].add(1.0), [{0}]),
        (lambda w, x: lax.cond(x[0, 0] > 0, lambda: w + 1, lambda: w), [{0}]),
        (lambda w, x: lax.optimization_barrier((w, x)), [{0}, {1}]),
        (lambda w, x: jax.checkpoint(lambda w: w * 2)(w), [{0}]),
        (in_a_scan, [{0}, {0}]),
        (in_a_while, [{0}]),
    ],
    ids=["step", "where", "queue", "update", "at", "cond", "barrier", "checkpoint", "scan", "while"],
)
def test_elements_that_live_on(function, expected):
    assert carried(function, W, W) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: jax.grad(loss)(w, x),
        lambda w, x: x @ w,
        lambda w, x: jnp.sum(w, axis=0),
        lambda w, x: jnp.cumsum(w, axis=0),
        lambda w, x: jnp.sort(w),
        lambda w, x: w[jnp.zeros(8, int)],
        lambda w, x: lax.scan(lambda carry, row: (jnp.zeros(8), row @ w), jnp.zeros(8), jnp.ones((8, 8)))[1],
    ],
    ids=["gradient", "product", "sum", "cumsum", "sort", "gather", "scan"],
)
def test_elements_that_do_not(function):
    assert carried(function, W, W) == [set()]


def test_a_penalty_is_carried_on_in_a_gradient():
    assert carried(jax.grad(lambda w, x: loss(w, x) + jnp.sum(w**2)), W, W) == [{0}]


def momentum(w, m, x):
    m = 0.9 * m + jax.grad(loss)(w, x)
    return w - 0.1 * m, m


def momentum_in_a_scan(w, m, x):
    return lax.scan(lambda c, _: (momentum(*c, x), None), (w, m), length=3)[0]


@pytest.mark.parametrize(
    ("function", "mixed"),
    [
        (momentum, {0, 2}),
        (momentum_in_a_scan, {0, 1, 2}),
        (lambda w, m, x: lax.cond(x[0, 0] > 0, lambda: w + m, lambda: w @ x), {0, 2}),
        (lambda w, m, x: lax.while_loop(lambda c: jnp.sum(c) > 0, lambda c: c - x, m), {1, 2}),
        (lambda w, m, x: (w + m, jnp.max(w)), {0}),
        (
            lambda w, m, x: jax.shard_map(
                lambda w: w + 1, mesh=jax.make_mesh((1,), ("a",)), in_specs=P(), out_specs=P()
            )(w),
            {0},
        ),
    ],
    ids=["momentum", "scan", "cond", "while", "max", "shard_map"],
)
def test_what_more_than_elementwise_arithmetic_touches(function, mixed):
    found = lineage(inline_calls(jax.make_jaxpr(function)(W, W, W))).mixed
    assert {position for position in range(3) if found >> position & 1} == mixed


def test_results_that_are_inputs():
    found = lineage(jax.make_jaxpr(lambda w, x: (x, w + 1, w, 1.0))(W, W))
    assert found.same == (1, None, 0, None)
    assert [found.is_input(result) for result in range(4)] == [True, False, True, False]
