"""Unrolled layers that do not fit: backward waits for gradients of parameters, and holds nothing for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.gradients_in_turn import GradientsInTurn, bodies_with_gradients


@dataclass(frozen=True)
class WaitForGradients:
    """Gradients of layers that no loop runs are computed in turn, where a step takes more memory than there is.

    Attributes:
      waiting_share: of the limit, what may be held for them; less if that does not fit.
    """

    waiting_share: float = 1 / 64
    name: str = "gradients_in_turn"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or environment.fits(best):
            return
        bodies = tuple(bodies_with_gradients(best.plan.program(base, environment.mesh, until=GradientsInTurn)))
        less: Proposal | None = None
        for size in (0, int(self.waiting_share * environment.limit_bytes)):
            plan = best.plan.having(GradientsInTurn, [GradientsInTurn(where, size) for where in bodies])
            less = Proposal(plan, f"backward waits for gradients that hold {size / 2**20:.0f} MiB", less)
        if bodies and less is not None:
            yield less
