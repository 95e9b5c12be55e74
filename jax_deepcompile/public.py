"""What ``import jax_deepcompile`` offers, and where each of it is; loaded when the first of it is asked for."""

# ruff: noqa: F401

from jax_deepcompile.api import shard
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering import targets
from jax_deepcompile.partition.rules.base import OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import REGISTRY
from jax_deepcompile.planner.candidate import Candidate, Environment
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
    UnshardUnrolled,
)
from jax_deepcompile.planner.strategy import Proposal, Stage, Strategy
from jax_deepcompile.report.simulated import simulate
from jax_deepcompile.step import ShardedStep
from jax_deepcompile.transforms.decision import Decision

register_rule = REGISTRY.register
"""Decorates ``rule(eqn) -> OpRule`` as the partitioning rule of the primitives named."""
