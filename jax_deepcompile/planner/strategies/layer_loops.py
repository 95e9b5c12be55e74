"""Layer loops: how far ahead they gather, and how far behind they reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import combiner_options, double_buffering
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import AS_READ, gathered_bytes, not_pipelined, pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.stacks import small_stacks
from jax_deepcompile.planner.strategies.unrolled import chosen_anew
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
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


@dataclass(frozen=True)
class DeepenLoops:
    """Backward loops gather one layer further ahead than they do, or reduce one further behind.

    A layer of a loop takes as long as any other, so while the loop runs one layer hides all that two could. Where
    backward begins, what comes between forward and backward can hide a second layer; a forward loop begins with the
    step, and nothing comes before. And where layers are waited for nevertheless, reducing later may help.
    """

    most_layers: int = 2
    name: str = "deepen_loops"
    stage: Stage = Stage.CLOSING

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if not best.waits:
            return
        ahead, size = self._deeper(best.plan, _gather_earlier), _gathered_bytes(base, best.plan, environment)
        if ahead is not None and budget.with_less(environment, size).fits(best):
            plan = chosen_anew(base, ahead, best, budget.with_less(environment, size))
            yield Proposal(plan, f"backward loops gather another layer ahead, {size / 2**30:.2f} GiB")
        behind = self._deeper(best.plan, _reduce_later)
        if behind is not None and _waits_in_loops_s(best) > WORTH_TRYING * best.prediction.step_s:
            plan = chosen_anew(base, behind, best, environment)
            yield Proposal(plan, "backward loops reduce another layer behind")

    def _deeper(self, plan: Plan, deeper: Callable[[LoopSchedule], LoopSchedule]) -> Plan | None:
        """``plan`` with its backward loops, those that reduce, made ``deeper``; None if that changes nothing."""
        before = plan.of(LoopSchedule)
        loops = tuple(deeper(each) if each.delay_layers else each for each in before)
        layers = [max(each.prefetch_layers, each.delay_layers) for each in loops]
        if loops == before or max(layers) > self.most_layers:
            return None
        sums = plan.of(DelayedReductions)  # carried as before
        return plan.having(LoopSchedule, loops).having(DelayedReductions, sums)


def _gather_earlier(schedule: LoopSchedule) -> LoopSchedule:
    if not schedule.prefetch_layers:
        return schedule
    return replace(schedule, prefetch_layers=schedule.prefetch_layers + 1, last_layers=schedule.last_layers + 1)


def _reduce_later(schedule: LoopSchedule) -> LoopSchedule:
    return replace(schedule, delay_layers=schedule.delay_layers + 1, first_layers=schedule.first_layers + 1)


def _gathered_bytes(base: Program, plan: Plan, environment: Environment) -> int:
    """What one more layer of the backward loops takes gathered."""
    backward = {schedule.loop for schedule in plan.of(LoopSchedule) if schedule.delay_layers}
    program = not_pipelined(plan).program(base, environment.mesh, until=AS_READ)
    return sum(gathered_bytes(loop) for loop in find_loops(program) if loop.name in backward)


def _waits_in_loops_s(best: Candidate) -> float:
    loops = (loop for loop in best.simulation.loops if loop.is_innermost and loop.trip.reduced_bytes)
    return sum(loop.executions * loop.trip_count * loop.hideable_s for loop in loops)
