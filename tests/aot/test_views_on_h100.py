"""Two views of a batch, one after the other: no example leaves its device, before or after the network."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_deepcompile as deepcompile

pytestmark = pytest.mark.h100_aot

D, LAYERS, EXAMPLES, LENGTH = 1024, 4, 2048, 64


def layer(h, w):
    scores = jnp.einsum("bsd,btd->bst", h @ w["query"], h @ w["key"]).astype(jnp.float32)
    h = h + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores).astype(h.dtype), h @ w["value"])
    return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None


def step(params, batch):
    def loss(params):
        h, _ = lax.scan(jax.checkpoint(layer), jnp.concatenate([batch["left"], batch["right"]]), params)
        left, right = jnp.split(h.mean(1, dtype=jnp.float32), 2)
        chances = jax.nn.log_softmax(left @ right.T)
        return -jnp.mean(jnp.diagonal(chances))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value


def make_step():
    """The step and the shapes of its arguments; ``deepcompile compare`` takes them."""
    sizes = {"query": (D, D), "key": (D, D), "value": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    params = {name: jax.ShapeDtypeStruct((LAYERS, *size), jnp.bfloat16) for name, size in sizes.items()}
    views = {name: jax.ShapeDtypeStruct((EXAMPLES, LENGTH, D), jnp.bfloat16) for name in ("left", "right")}
    return step, params, views


def test_no_example_leaves_its_device():
    _, params, views = make_step()
    traced = deepcompile.shard(step, deepcompile.targets.h100(nodes=2), passes=()).trace(params, views)
    assert "all-to-all" not in (traced.lower().compile().as_text() or "")
