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
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.simulate import simulate
from jax_deepcompile.lowering import targets
from jax_deepcompile.partition.rules.registry import REGISTRY
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.strategies import (
    BucketCollectives,
    DeepenLoops,
    DelayReductions,
    KeepActivations,
    OverlapMicrobatches,
    PipelineLoops,
    PrefetchGathers,
    ReduceInOrder,
    Unshard,
    UnshardMicrobatches,
    UnshardStraightLine,
)

register_rule = REGISTRY.register
"""Decorates ``rule(eqn) -> OpRule`` as the partitioning rule of the primitives named; see ``partition.rules.base``."""

__all__ = [
    "BucketCollectives",
    "DeepenLoops",
    "DelayReductions",
    "KeepActivations",
    "OverlapMicrobatches",
    "PipelineLoops",
    "Plan",
    "PrefetchGathers",
    "Profile",
    "ReduceInOrder",
    "ShardedStep",
    "Unshard",
    "UnshardMicrobatches",
    "UnshardStraightLine",
    "errors",
    "register_rule",
    "shard",
    "simulate",
    "targets",
]
