"""Layer loops that gather a layer ahead and reduce a layer behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import combiner_options, double_buffering
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.layers import AS_READ, pipelined
from jax_deepcompile.planner.stacks import small_stacks
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
        plan = best.plan.having(StackCollectives, small_stacks(base, environment))
        stacked = plan.program(base, environment.mesh, until=AS_READ)
        schedules = choose_schedules(stacked)
        options = dict(plan.options)
        if schedules:
            options |= double_buffering() | combiner_options(*layer_bytes(stacked, schedules))
        ahead = sum(1 for schedule in schedules if schedule.prefetch_layers)
        behind = sum(1 for schedule in schedules if schedule.delay_layers)
        small = sum(len(choice.gathers) + len(choice.reductions) for choice in plan.of(StackCollectives))
        what = [f"{ahead} loops gather a layer ahead"] * bool(ahead) + [f"{behind} reduce a layer behind"] * bool(
            behind
        )
        decision = ", ".join([*(what or ["loops that gather nothing large"]), "one bucket each"])
        decision += f"; {small} small collectives once for all layers" * bool(small)
        yield Proposal(pipelined(plan, base, schedules).replace(options=options), decision)


def layer_bytes(program: Program, schedules: Sequence[LoopSchedule]) -> tuple[int, int]:
    """The most bytes that one iteration of a layer loop gathers, and keeps of what it reduces."""
    wanted = {schedule.loop for schedule in schedules}
    splits = [split_body(loop.eqn) for loop in find_loops(program) if loop.name in wanted]
    gathered = max(sum(map(size_bytes, split.gathered)) for split in splits)
    late = [[eqn for eqn in split.late.jaxpr.eqns if eqn.primitive.name == "reduce_scatter"] for split in splits]
    reduced = max(sum(size_bytes(var) for eqn in eqns for var in eqn.outvars) for eqns in late)
    return gathered, reduced
