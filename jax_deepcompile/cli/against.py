"""``explain --against``: another plan of a step, or another step, beside it, and what differs by the user's lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_deepcompile.cli.files import simulated
from jax_deepcompile.cli.options import Cluster, plan_in
from jax_deepcompile.cli.steps import StepRequest, sharded_step
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.report.words import LINES, seconds_text, table
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.step import ShardedStep


def other_run(
    against: str, step: ShardedStep, args: tuple, request: StepRequest, cluster: Cluster, progress: Progress
) -> Simulation:
    """What ``step`` takes by the plan in the file ``against``, or the step of that name as planned, simulated."""
    progress.say(f"compiling {against}")
    if against.endswith(".json"):
        return simulated(step.reshard(plan=plan_in(Path(against))).trace(*args))
    other, others = sharded_step(request.about(against), cluster, progress)
    return simulated(other.trace(*others))


@dataclass(frozen=True)
class Line:
    """Seconds a step of one of the user's lines, kernels and what they wait for, of both."""

    line: str
    seconds: float
    other_seconds: float


@dataclass(frozen=True)
class Difference:
    """A step and what it is told against.

    Attributes:
      name: of the other.
      step_s, other_step_s: simulated.
      by_line: all lines, those that differ most first; they add up to the steps.
    """

    name: str
    step_s: float
    other_step_s: float
    by_line: tuple[Line, ...]

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, Any]]) -> Difference:
        """Of the last of a page's runs and the first."""
        other, run = runs[0], runs[-1]
        both = [
            Line(line, sum(run["lines"].get(line, ())), sum(other["lines"].get(line, ())))
            for line in dict.fromkeys([*run["lines"], *other["lines"]])
        ]
        both.sort(key=lambda each: -abs(each.seconds - each.other_seconds))
        return cls(other["name"], run["figures"]["step_s"], other["figures"]["step_s"], tuple(both))

    def lines(self) -> list[str]:
        head = f"against {self.name}, {seconds_text(self.step_s)} and {seconds_text(self.other_step_s)}, by your lines:"
        shown = [each for each in self.by_line[:LINES] if each.seconds or each.other_seconds]
        rows = [(_more(each), each.seconds, each.other_seconds, each.line) for each in shown]
        return [head, *table([(more, seconds_text(one), seconds_text(other), line) for more, one, other, line in rows])]


def _more(each: Line) -> str:
    more_s = each.seconds - each.other_seconds
    return "+" * (more_s > 0) + seconds_text(more_s)
