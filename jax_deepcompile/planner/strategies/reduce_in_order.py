"""Reductions of unrolled layers follow one another as gradients are ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.planner.unrolled import bandwidth_bound_bytes, waits
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions, reduce_in_order


@dataclass(frozen=True)
class ReduceInOrder:
    """Reductions outside of layer loops follow one another in the order in which gradients are ready.

    Fewer at a time begin sooner, more at a time take less: what is better shows once they are scheduled.

    Attributes:
      latency_shares: of the time of reductions that go together; one proposal each.
    """

    latency_shares: tuple[float, ...] = (0.3,)
    name: str = "reduce_in_order"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if not waits(base, best):
            return
        program, in_loops = best.plan.program(base, environment.mesh), not best.plan.of(LoopSchedule)
        for share in self.latency_shares:
            size = bandwidth_bound_bytes(base, environment, share)
            ordered = OrderedReductions(size, in_loops)
            if ordered not in best.plan.decisions and reduce_in_order(program, size, in_loops) is not program:
                plan = best.plan.having(OrderedReductions, [ordered])
                yield Proposal(plan, f"reductions follow one another, {size / 2**20:.0f} MiB at a time")
