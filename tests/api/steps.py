"""A linear model and its training step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_deepcompile.report.division import arguments
from jax_deepcompile.step import ShardedStep
from tests.equality.harness import assert_close


def create(key=None):
    return {"w": jnp.arange(128.0).reshape(16, 8) / 100, "count": jnp.int32(0)}


def step(state, batch):
    def loss_of(w):
        return jnp.mean((batch["x"] @ w) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, loss


def batch(size: int = 16):
    return {"x": np.linspace(-1, 1, size * 16, dtype=np.float32).reshape(size, 16)}


def assert_equal(found, expected) -> None:
    assert_close(found, expected, 1e-5, "result")


def arguments_of(sharded: ShardedStep) -> str:
    """What the arguments it was last traced for are, in a line."""
    assert sharded._last is not None
    return arguments(sharded._last.program)
