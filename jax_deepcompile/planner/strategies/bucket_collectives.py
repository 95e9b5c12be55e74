"""Neighbouring collectives in one bucket, where no layer loop is pipelined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.costs.program_time import ranks_per_node
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import combiner_options
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule


@dataclass(frozen=True)
class BucketCollectives:
    """Neighbours outside of layer loops share one collective, up to the size where its latency no longer counts."""

    name: str = "bucket_collectives"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if best.plan.of(LoopSchedule):
            return
        size = bandwidth_bound_bytes(base, environment, _LATENCY_SHARE)
        options = dict(best.plan.options) | combiner_options(size, size // base.mesh.size)
        yield Proposal(best.plan.replace(options=options), f"buckets of {size / 2**20:.0f} MiB")


_LATENCY_SHARE = 0.05
"""Of a bucket's time: beyond that, joining more saves less than it delays."""


def bandwidth_bound_bytes(program: Program, environment: Environment, latency_share: float) -> int:
    """The smallest power of two of bytes whose gather spends no more than ``latency_share`` of its time on latency."""
    costs, names = environment.costs, list(program.mesh.names)
    ranks = ranks_per_node(names, program.mesh, costs)

    def seconds(size: int) -> float:
        return costs.collective_s("all-gather", size, program.mesh.size, ranks)

    size = 1 << 20
    while seconds(1) > latency_share * seconds(size) and size < 1 << 32:
        size *= 2
    return size
