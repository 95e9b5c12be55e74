"""Neighbouring collectives of unrolled layers in one bucket, up to where latency no longer counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import combiner_options
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.planner.unrolled import MOSTLY_LATENCY, bandwidth_bound_bytes, without_starts
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.unshard import ReusedGathers, repeated_gathers


@dataclass(frozen=True)
class BucketCollectives:
    """Neighbours outside of layer loops share one collective, up to the size where its latency no longer counts.

    What is gathered again stays where all of it is sent sooner than a collective begins.
    """

    name: str = "bucket_collectives"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if best.plan.of(LoopSchedule):
            return
        size = bandwidth_bound_bytes(base, environment, _LATENCY_SHARE)
        options = dict(best.plan.options) | combiner_options(size, size // base.mesh.size)
        plan, decision = best.plan.replace(options=options), f"buckets of {size / 2**20:.0f} MiB"
        again = repeated_gathers(without_starts(base, best.plan.without(ReusedGathers), environment))
        again_bytes = sum(gather.size_bytes for _, gather in again.values())
        if again and again_bytes <= bandwidth_bound_bytes(base, environment, MOSTLY_LATENCY):
            plan = plan.having(ReusedGathers, [ReusedGathers(tuple(again))])
            decision += f"; all {len(again)} repeated gathers stay, {again_bytes / 2**20:.2f} MiB"
        yield Proposal(plan, decision)


_LATENCY_SHARE = 0.05
"""Of a bucket's time: beyond that, joining more saves less than it delays."""
