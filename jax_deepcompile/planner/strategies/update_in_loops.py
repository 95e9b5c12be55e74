"""What of the state of layers is updated in their backward loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.layers import in_place
from jax_deepcompile.planner.state_on_host import updatable
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.accumulate_in_loops import AccumulateInLoops
from jax_deepcompile.transforms.update_in_loops import UpdatedInLoop


@dataclass(frozen=True)
class UpdateInLoops:
    """Proposes that state is updated as gradients are there, where that is done element by element."""

    name: str = "update_in_loops"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.platform != "cuda" or best.plan.of(UpdatedInLoop):
            return
        program = best.plan.program(base, environment.mesh, until=AccumulateInLoops)
        found = updatable(program, environment.mesh)
        if found:
            plan = in_place(best.plan.having(UpdatedInLoop, found), program)
            yield Proposal(plan, f"{len(found)} backward loops update the state of their layers")
