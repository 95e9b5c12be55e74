"""A step of a scanned model that tests look at, and what they read of pages."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp

import jax_deepcompile as deepcompile

SHAPES = {"w": jax.ShapeDtypeStruct((4, 16, 16), jnp.float32)}, jax.ShapeDtypeStruct((16, 16), jnp.float32)


def step(params, batch):
    def loss(params):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(layer, batch, params["w"])[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def traced(**options):
    return deepcompile.shard(step, {"fsdp": 8}, state_argnums=0, **options).trace(*SHAPES)


def data_of(html: str) -> dict[str, Any]:
    """What a page draws."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)
