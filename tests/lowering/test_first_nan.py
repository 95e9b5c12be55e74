"""A step that makes what is no number says where, as JAX does of a function that is not sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_deepcompile as deepcompile

pytestmark = pytest.mark.cpu_mesh

ONES = np.ones((16, 16), np.float32)


def step(weights, batch):
    loss, gradients = jax.value_and_grad(lambda weights: jnp.mean(jnp.log(batch @ weights)))(weights)
    return weights - 0.1 * gradients, loss


@pytest.mark.parametrize(("batch", "operation"), [(-ONES, "log"), (np.nan * ONES, "dot_general")])
@pytest.mark.parametrize("donate", [True, False])
def test_the_first_one_is_found(batch, operation, donate):
    with jax.debug_nans(True):
        sharded = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0, donate=donate)
        weights, _ = sharded(jnp.asarray(ONES), ONES)
        with pytest.raises(FloatingPointError, match=rf"\(nan\) encountered in {operation} at .*test_first_nan.py:\d+"):
            sharded(weights, batch)


def test_infinite_values_are_looked_for_only_if_asked_for():
    sharded = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0, donate=False)
    with jax.debug_nans(True):
        assert sharded(jnp.asarray(ONES), 1e30 * ONES)[1] == pytest.approx(np.log(16e30), rel=1e-6)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) encountered in dot_general at"):
        sharded(jnp.asarray(1e30 * ONES), 1e30 * ONES)
