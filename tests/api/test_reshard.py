"""The same step with other options."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_deepcompile as deepcompile

pytestmark = pytest.mark.cpu_mesh


@deepcompile.shard({"data": 2, "fsdp": 4}, microbatches=2)
def step(state, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - 0.1 * grads, loss


STATE, BATCH = np.ones((8, 8), np.float32), np.ones((16, 8), np.float32)


def test_what_is_not_said_stays():
    again = step.reshard(microbatches=1)
    assert dict(again.mesh.shape) == {"data": 2, "fsdp": 4}
    assert step.reshard({"fsdp": 8}).mesh.size == 8


def test_it_computes_the_same():
    for other in (step, step.reshard({"fsdp": 8}), step.reshard(microbatches=1, passes=())):
        new, loss = other(jnp.asarray(STATE), BATCH)
        np.testing.assert_allclose(loss, 64.0)
        np.testing.assert_allclose(new, step(jnp.asarray(STATE), BATCH)[0], rtol=1e-6)


def test_the_step_it_was_made_from_is_left_alone():
    before = step.trace(STATE, BATCH).sharded
    step.reshard({"fsdp": 8}, microbatches=1)
    assert step.trace(STATE, BATCH).sharded is before
