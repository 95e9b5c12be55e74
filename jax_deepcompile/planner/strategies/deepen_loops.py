"""Backward loops that gather another layer ahead, or reduce another one behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import AS_READ, gathered_bytes, not_pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.planner.unrolled import chosen_anew
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule


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
