"""Experts that drop no token: no row leaves its device, and none meets more than its expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.hlo.types import leaves
from tests.schedules import instructions

pytestmark = pytest.mark.h100_aot

D, EXPERTS, K, LAYERS = 512, 16, 2, 3
EXAMPLES, LENGTH = 32, 2048


def layer(x, w):
    tokens = x.reshape(-1, D)
    chances, chosen = lax.top_k(jax.nn.softmax((tokens @ w["router"]).astype(jnp.float32)), K)
    ids = chosen.reshape(-1)
    order, sizes = jnp.argsort(ids), jnp.bincount(ids, length=EXPERTS)
    hidden = jax.nn.silu(lax.ragged_dot(tokens[order // K], w["up"], sizes))
    rows = lax.ragged_dot(hidden, w["down"], sizes)[jnp.argsort(order)].reshape(-1, K, D)
    return x + jnp.sum(rows * chances[..., None].astype(rows.dtype), 1).reshape(x.shape), None


def step(params, x):
    def loss(params):
        y, _ = lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def make_step():
    """The step and the shapes of its arguments; ``deepcompile compare`` takes them."""
    shapes = {"router": (LAYERS, D, EXPERTS), "up": (LAYERS, EXPERTS, D, 2 * D), "down": (LAYERS, EXPERTS, 2 * D, D)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return step, params, jax.ShapeDtypeStruct((EXAMPLES, LENGTH, D), jnp.bfloat16)


def test_rows_stay_and_meet_one_expert():
    """All rows would come together to be sorted, and XLA would multiply each with the matrices of all experts."""
    _, params, x = make_step()
    traced = deepcompile.shard(step, deepcompile.targets.h100(nodes=2), passes=()).trace(params, x)
    assert "activations moved between devices: none" in str(traced.explain())
    made = instructions(read(traced.lower().compile().as_text() or ""))
    rows = EXAMPLES * LENGTH * K // 16
    arrays = [array for each in made for _, array in leaves(each.shape) if array.dtype in ("bf16", "f32")]
    assert max(array.elements for array in arrays) < rows * EXPERTS * D / 2
