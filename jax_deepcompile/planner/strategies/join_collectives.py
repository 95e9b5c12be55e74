"""Devices that share their host: all of them wait for each collective, so there are few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.costs.cost_model import Direction
from jax_deepcompile.costs.program_time import ranks_per_node
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.compute_whole import ComputedWhole
from jax_deepcompile.transforms.join_collectives import JoinedCollectives


@dataclass(frozen=True)
class JoinCollectives:
    """What is small is gathered and reduced together, as long as copying it takes less than waiting once more.

    Attributes:
      factors: times the size at which both take the same; one proposal each.
      fewest: collectives saved that are worth it.
    """

    factors: tuple[float, ...] = (1.0, 4.0, 0.25)
    fewest: int = 8
    name: str = "join_collectives"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        known = set[int]()
        for factor in self.factors:
            gather_bytes, reduce_bytes = (
                int(factor * break_even_bytes(kind, base, environment)) for kind in ("all-gather", "reduce-scatter")
            )
            joined = JoinedCollectives(gather_bytes, reduce_bytes)
            saved = joined.saved(best.program)
            if saved >= self.fewest and saved not in known:
                known.add(saved)
                plan = best.plan.having(ComputedWhole, [ComputedWhole(reduce_bytes)])
                decision = f"{saved} collectives of up to {gather_bytes / 2**10:.0f} KiB are parts of others"
                yield Proposal(plan.having(JoinedCollectives, [joined]), decision)


def break_even_bytes(kind: str, program: Program, environment: Environment) -> int:
    """The largest power of two of bytes of a whole value that are copied in and out while a collective begins."""
    costs, names = environment.costs, list(program.mesh.names)
    devices = program.mesh.size_of(names)
    begins_s = costs.collective_s(kind, 1, devices, ranks_per_node(names, program.mesh, costs))

    def copying_s(size_bytes: float) -> float:
        return costs.copy_s(size_bytes, Direction.TO_HOST) - costs.copy_s(0, Direction.TO_HOST)

    size = 1
    while size < _MOST_BYTES and copying_s(2 * size * (1 + 1 / devices)) <= begins_s:
        size *= 2
    return size


_MOST_BYTES = 1 << 24
"""Beyond any cache: what is larger takes its time whatever begins when."""
