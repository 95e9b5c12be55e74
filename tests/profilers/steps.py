"""A small train step with a loop over layers, as a user writes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_deepcompile as deepcompile
from jax_deepcompile.step import ShardedStep

LAYERS, WIDTH, EXAMPLES = 3, 64, 32
OPTIMIZER = optax.adam(1e-2)


def create() -> tuple[Any, Any]:
    params = {"layers": jnp.full((LAYERS, WIDTH, WIDTH), 0.02), "head": jnp.ones((WIDTH, 8))}
    return params, OPTIMIZER.init(params)


def batch() -> dict[str, np.ndarray]:
    return {"x": np.linspace(-1, 1, EXAMPLES * WIDTH, dtype=np.float32).reshape(EXAMPLES, WIDTH)}


def train_step(state, batch):
    params, opt_state = state

    def loss_of(params):
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])
        return jnp.mean(jnp.square(hidden @ params["head"]))

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def sharded(**options) -> ShardedStep:
    return deepcompile.shard(train_step, **options)
