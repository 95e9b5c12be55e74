"""How many layers ahead loops gather, and how many behind they reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.apply import apply_loops
from jax_deepcompile.planner.candidate import WORTH_TRYING, Environment, Trial
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.search import Proposal
from jax_deepcompile.planner.strategies.straight_line import chosen_anew
from jax_deepcompile.planner.strategies.unshard import gathered_bytes
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

    def close(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        if not now.waits:
            return
        ahead, size = self._deeper(now.plan, _gather_earlier), _gathered_bytes(base, now.plan, environment)
        if ahead is not None and _has_room(now, environment, size):
            plan = chosen_anew(base, ahead, now, _with_less(environment, size))
            yield Proposal(plan, f"backward loops gather another layer ahead, {size / 2**30:.2f} GiB")
        behind = self._deeper(now.plan, _reduce_later)
        if behind is not None and _waits_in_loops_s(now) > WORTH_TRYING * now.prediction.step_s:
            plan = chosen_anew(base, behind, now, environment)
            yield Proposal(plan, "backward loops reduce another layer behind")

    def _deeper(self, plan: Plan, deeper: Callable[[LoopSchedule], LoopSchedule]) -> Plan | None:
        """``plan`` with its backward loops, those that reduce, made ``deeper``; None if that changes nothing."""
        loops = tuple(deeper(each) if each.delay_layers else each for each in plan.loops)
        layers = [max(each.prefetch_layers, each.delay_layers) for each in loops]
        if loops == plan.loops or max(layers) > self.most_layers:
            return None
        return plan.replace(loops=loops, delayed=plan.delayed)  # sums are carried as before


def _gather_earlier(schedule: LoopSchedule) -> LoopSchedule:
    if not schedule.prefetch_layers:
        return schedule
    return replace(schedule, prefetch_layers=schedule.prefetch_layers + 1, last_layers=schedule.last_layers + 1)


def _reduce_later(schedule: LoopSchedule) -> LoopSchedule:
    return replace(schedule, delay_layers=schedule.delay_layers + 1, first_layers=schedule.first_layers + 1)


def _gathered_bytes(base: Program, plan: Plan, environment: Environment) -> int:
    """What one more layer of the backward loops takes gathered."""
    backward = {schedule.loop for schedule in plan.loops if schedule.delay_layers}
    program = apply_loops(base, environment.mesh, plan.replace(loops=()))
    return sum(gathered_bytes(loop) for loop in find_loops(program.jaxpr) if loop.name in backward)


def _with_less(environment: Environment, taken_bytes: int) -> Environment:
    """``environment`` without memory that something else takes."""
    limit = environment.limit_bytes
    return environment if limit is None else replace(environment, limit_bytes=limit - taken_bytes)


def _has_room(now: Trial, environment: Environment, needed_bytes: int) -> bool:
    limit = environment.limit_bytes
    return limit is None or now.prediction.peak_bytes + needed_bytes <= limit


def _waits_in_loops_s(now: Trial) -> float:
    loops = (loop for loop in now.simulation.loops if loop.is_innermost and loop.trip.reduced_bytes)
    return sum(loop.executions * loop.trip_count * loop.hideable_s for loop in loops)
