"""Layer loops that gather a layer ahead and reduce a layer behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.layers import all_pipelined
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.stack_collectives import StackCollectives


@dataclass(frozen=True)
class PipelineLoops:
    """Layer loops that gather ahead and reduce behind: one bucket a layer each way, small parameters once for all."""

    name: str = "pipeline_loops"
    stage: Stage = Stage.OPENING

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if best.plan.of(LoopSchedule) or not choose_schedules(base):
            return
        plan = all_pipelined(best.plan, base, environment)
        ahead = sum(1 for schedule in plan.of(LoopSchedule) if schedule.prefetch_layers)
        behind = sum(1 for schedule in plan.of(LoopSchedule) if schedule.delay_layers)
        small = sum(len(choice.gathers) + len(choice.reductions) for choice in plan.of(StackCollectives))
        what = [f"{ahead} loops gather a layer ahead"] * bool(ahead) + [f"{behind} reduce a layer behind"] * bool(
            behind
        )
        decision = ", ".join([*(what or ["loops that gather nothing large"]), "one bucket each"])
        decision += f"; {small} small collectives once for all layers" * bool(small)
        yield Proposal(plan, decision)
