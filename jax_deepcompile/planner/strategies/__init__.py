"""What planning proposes, by what it is about; here is the order in which strategies propose."""

from __future__ import annotations

from jax_deepcompile.planner.strategies.bucket_collectives import BucketCollectives
from jax_deepcompile.planner.strategies.compute_whole import ComputeWhole
from jax_deepcompile.planner.strategies.deepen_loops import DeepenLoops
from jax_deepcompile.planner.strategies.delay_reductions import DelayReductions
from jax_deepcompile.planner.strategies.gradients_in_turn import WaitForGradients
from jax_deepcompile.planner.strategies.join_collectives import JoinCollectives
from jax_deepcompile.planner.strategies.keep_activations import KeepActivations
from jax_deepcompile.planner.strategies.keep_gathered import KeepGathered
from jax_deepcompile.planner.strategies.overlap_microbatches import OverlapMicrobatches
from jax_deepcompile.planner.strategies.pipeline_loops import PipelineLoops
from jax_deepcompile.planner.strategies.prefetch import PrefetchGathers
from jax_deepcompile.planner.strategies.products_after_loops import ProductsAfterLoops
from jax_deepcompile.planner.strategies.reduce_in_order import ReduceInOrder
from jax_deepcompile.planner.strategies.stacks_in_turn import StacksInTurn
from jax_deepcompile.planner.strategies.unshard import Unshard
from jax_deepcompile.planner.strategies.unshard_microbatches import UnshardMicrobatches
from jax_deepcompile.planner.strategies.unshard_unrolled import UnshardUnrolled
from jax_deepcompile.planner.strategies.update_in_loops import UpdateInLoops
from jax_deepcompile.planner.strategy import Stage, Strategy

STRATEGIES: tuple[Strategy, ...] = (
    PipelineLoops(),
    ProductsAfterLoops(),
    StacksInTurn(),
    WaitForGradients(),
    ComputeWhole(),
    KeepActivations(),
    ComputeWhole(),
    BucketCollectives(),
    Unshard(),
    KeepActivations(),
    OverlapMicrobatches(),
    UnshardMicrobatches(),
    DelayReductions(),
    PrefetchGathers(),
    UnshardUnrolled(),
    PrefetchGathers(),
    ReduceInOrder(),
    DeepenLoops(),
    ReduceInOrder(latency_shares=(0.3, 0.1), stage=Stage.CLOSING),
)
"""The list: hide communication in loops, join what is small, spend the memory that is left on computing and
communicating less."""

ONE_DEVICE: tuple[Strategy, ...] = (
    ProductsAfterLoops(),
    StacksInTurn(),
    WaitForGradients(),
    UpdateInLoops(),
    KeepActivations(),
)
"""Where there is nothing to communicate."""

ON_A_HOST: tuple[Strategy, ...] = (ProductsAfterLoops(), KeepGathered(), KeepActivations(), JoinCollectives())
"""Where devices share their host, and no collective runs beside compute."""
