"""What loops inside of layers stack up takes memory while they run, not from the beginning of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.analysis.loops import has_layers_with_loops
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import stacks_in_turn
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage


@dataclass(frozen=True)
class StacksInTurn:
    """XLA copies the zeros that loops begin with as each begins, not for all of them at once.

    That takes a little longer, and of layers with loops inside, checkpointed or computed again, less memory.
    """

    name: str = "stacks_in_turn"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        options = dict(best.plan.options) | stacks_in_turn()
        if environment.platform == "cuda" and has_layers_with_loops(base):
            yield Proposal(best.plan.replace(options=options), "stacks take memory as their loop begins")
