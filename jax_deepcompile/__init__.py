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
from jax_deepcompile.planner.strategies.deepen_loops import DeepenLoops
from jax_deepcompile.planner.strategies.delay_reductions import DelayReductions
from jax_deepcompile.planner.strategies.keep_activations import KeepActivations
from jax_deepcompile.planner.strategies.overlap_microbatches import OverlapMicrobatches
from jax_deepcompile.planner.strategies.pipeline_loops import BucketCollectives, PipelineLoops
from jax_deepcompile.planner.strategies.straight_line import PrefetchGathers, ReduceInOrder, UnshardStraightLine
from jax_deepcompile.planner.strategies.unshard import Unshard
from jax_deepcompile.planner.strategies.unshard_microbatches import UnshardMicrobatches

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
