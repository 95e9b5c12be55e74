"""Devices that share their host: what loops gather again and again stays, as gathering hides behind nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.layers import keep_gathered
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.keep_gathered import KeptGathers


@dataclass(frozen=True)
class KeepGathered:
    """What loops gather again and again stays, as much as fits.

    Attributes:
      fraction: of the memory that the devices share with all else on their host: for what stays, on all of them.
    """

    fraction: float = 0.25
    name: str = "keep_gathered"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        held_bytes = int(self.fraction * environment.costs.hardware.memory_bytes / base.mesh.size)
        if kept := keep_gathered(base, held_bytes):
            plan = best.plan.having(KeptGathers, kept)
            yield Proposal(plan, f"what loops gather again and again stays, up to {held_bytes / 2**20:.0f} MiB")
