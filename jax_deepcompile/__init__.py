"""Fully sharded training of ordinary JAX train steps.

Put ``@jax_deepcompile.shard`` on a single-device Flax train step and it trains fully sharded::

    import jax_deepcompile as deepcompile

    @deepcompile.shard
    def train_step(state, batch):
        ...
        return state, metrics
"""

from jax_deepcompile import errors
from jax_deepcompile.api import ShardedStep, shard

__all__ = ["ShardedStep", "errors", "shard"]
