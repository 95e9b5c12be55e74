"""Statistics that are divided just to be put together again, as batch norms' are: devices wait for each other once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.planner.unrolled import MOSTLY_LATENCY, bandwidth_bound_bytes
from jax_deepcompile.transforms.compute_whole import ComputedWhole


@dataclass(frozen=True)
class ComputeWhole:
    """What is reduced to be gathered is computed whole on every device, while waiting takes longer than sending it."""

    name: str = "compute_whole"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        size = bandwidth_bound_bytes(base, environment, MOSTLY_LATENCY)
        whole = ComputedWhole(size)
        if not best.plan.of(ComputedWhole) and ComputedWhole.apply(base, environment.mesh, [whole]) is not base:
            yield Proposal(best.plan.having(ComputedWhole, [whole]), whole.describe())
