"""What planning proposes, by what it is about; here is the order in which strategies propose."""

from __future__ import annotations

from jax_deepcompile.planner.strategies.hosts import JoinCollectives, KeepGathered
from jax_deepcompile.planner.strategies.keep_activations import KeepActivations
from jax_deepcompile.planner.strategies.layer_loops import DeepenLoops, PipelineLoops
from jax_deepcompile.planner.strategies.microbatches import DelayReductions, OverlapMicrobatches, UnshardMicrobatches
from jax_deepcompile.planner.strategies.unrolled import (
    BucketCollectives,
    PrefetchGathers,
    ReduceInOrder,
    UnshardUnrolled,
)
from jax_deepcompile.planner.strategies.unshard import Unshard
from jax_deepcompile.planner.strategy import Strategy

STRATEGIES: tuple[Strategy, ...] = (
    PipelineLoops(),
    KeepActivations(),
    BucketCollectives(),
    Unshard(),
    KeepActivations(),
    OverlapMicrobatches(),
    UnshardMicrobatches(),
    DelayReductions(),
    PrefetchGathers(),
    UnshardUnrolled(),
    ReduceInOrder(),
    DeepenLoops(),
)
"""The list: hide communication in loops, join what is small, spend the memory that is left on computing and
communicating less."""

ONE_DEVICE: tuple[Strategy, ...] = (KeepActivations(),)
"""Where there is nothing to communicate."""

ON_A_HOST: tuple[Strategy, ...] = (KeepGathered(), JoinCollectives())
"""Where devices share their host, and no collective runs beside compute."""
