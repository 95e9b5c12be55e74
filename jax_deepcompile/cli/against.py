"""``explain --against``: another plan of a step, or another step, beside it, and what differs by the user's lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax_deepcompile.cli.options import Cluster, plan_in
from jax_deepcompile.cli.steps import StepRequest, sharded_step
from jax_deepcompile.report.words import LINES, bytes_text, seconds_text, table
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.stages import TracedStep
from jax_deepcompile.step import ShardedStep


def other_step(
    against: str, step: ShardedStep, args: tuple, request: StepRequest, cluster: Cluster, progress: Progress
) -> TracedStep:
    """``step`` by the plan in the file ``against``, or the step of that name."""
    progress.say(f"compiling {against}")
    if against.endswith(".json"):
        return step.reshard(plan=plan_in(Path(against), "--against")).trace(*args)
    other, others = sharded_step(replace(request, step=against), cluster, progress)
    return other.trace(*others)


@dataclass(frozen=True)
class Line:
    """One of the user's lines, of both.

    Attributes:
      line: ``file:line``, or what is no line of theirs.
      seconds, other_seconds: of a step, kernels and what they wait for.
      bytes, other_bytes: of a device's memory at the peak.
    """

    line: str
    seconds: float
    other_seconds: float
    bytes: int
    other_bytes: int


@dataclass(frozen=True)
class Difference:
    """A step and what it is told against.

    Attributes:
      name: of the other.
      step_s, other_step_s: simulated.
      peak_bytes, other_peak_bytes: of a device's memory.
      by_line: all lines, those whose seconds differ most first; they add up to the steps, and to the peaks.
    """

    name: str
    step_s: float
    other_step_s: float
    peak_bytes: int
    other_peak_bytes: int
    by_line: tuple[Line, ...]

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, Any]]) -> Difference:
        """Of the last of a page's runs and the first."""
        other, run = runs[0], runs[-1]
        both = [
            Line(
                line,
                *(sum(each["lines"].get(line, ())) for each in (run, other)),
                *(each["line_bytes"].get(line, 0) for each in (run, other)),
            )
            for line in dict.fromkeys(line for each in (run, other) for line in (*each["lines"], *each["line_bytes"]))
        ]
        both.sort(key=lambda each: -abs(each.seconds - each.other_seconds))
        steps = run["figures"]["step_s"], other["figures"]["step_s"]
        return cls(other["name"], *steps, run["figures"]["peak_bytes"], other["figures"]["peak_bytes"], tuple(both))

    def lines(self) -> list[str]:
        steps = f"{seconds_text(self.step_s)} and {seconds_text(self.other_step_s)}"
        peaks = f"{bytes_text(self.peak_bytes)} and {bytes_text(self.other_peak_bytes)}"
        times = [(each.seconds, each.other_seconds, each.line) for each in self.by_line]
        sizes = [(each.bytes, each.other_bytes, each.line) for each in self.by_line]
        lines = [f"against {self.name}, {steps}, by your lines:", *_rows(times, seconds_text)]
        if self.peak_bytes and self.other_peak_bytes:
            lines += [f"memory at the peak, {peaks}, by your lines:", *_rows(sizes, bytes_text)]
        return lines


def _rows(both: Iterable[tuple[float, float, str]], text: Callable[[float], str]) -> list[str]:
    """What differs most first, of those that have something."""
    most = sorted(both, key=lambda each: -abs(each[0] - each[1]))[:LINES]
    shown = [(one, other, line) for one, other, line in most if one or other]
    return table([(_signed(one - other, text), text(one), text(other), line) for one, other, line in shown])


def _signed(more: float, text: Callable[[float], str]) -> str:
    return "+" * (more > 0) + "-" * (more < 0) + text(abs(more))
