"""Where a step's time goes: kernels, and what they wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jax_deepcompile._jax_compat import users_line
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.streams import Part, Stream
from jax_deepcompile.costs.utilisation import Utilisation
from jax_deepcompile.planner.plan import Prediction
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.origins import Origins
from jax_deepcompile.report.words import line_text, operation_text, percent_text, seconds_text, table

_MOST = 5
"""Kernels, and waits, that are named."""

_ROUNDING_S = 1e-9


@dataclass(frozen=True)
class Share:
    """A part of the step.

    Attributes:
      what: kernels of one kind, or waiting for one kind of operation.
      seconds: of the step.
    """

    what: str
    seconds: float


@dataclass(frozen=True)
class Costly:
    """What costs much, all its executions in a step together.

    Attributes:
      what: the operation, by the user's scopes.
      line: the user's ``file:line``; empty if unknown.
      seconds: a step.
      times: how often it runs in a step.
    """

    what: str
    line: str
    seconds: float
    times: int


@dataclass(frozen=True)
class Ceiling:
    """What the step would take ``given`` something; ``mfu`` is None where nothing is multiplied."""

    given: str
    seconds: float
    mfu: float | None


@dataclass(frozen=True)
class Seconds:
    """Where the time goes. All is simulated.

    Attributes:
      step_s: of the step; ``parts`` add up to it.
      parts: kernels by what they do, then what they wait for.
      communication_s, exposed_s: of collectives, and of it what kernels wait for.
      copy_s, exposed_copy_s: the same of copies between device and host.
      bound_s: what no schedule of the same operations beats.
      ceilings: kernels that never wait, beside all of that, whether or not it fits beside them; and with nothing
        computed again either.
      kernels, waits: those that cost most.
      unknown: what is not known, and why.
    """

    step_s: float | None
    parts: tuple[Share, ...] = ()
    communication_s: float = 0.0
    exposed_s: float = 0.0
    copy_s: float = 0.0
    exposed_copy_s: float = 0.0
    bound_s: float = 0.0
    ceilings: tuple[Ceiling, ...] = ()
    kernels: tuple[Costly, ...] = ()
    waits: tuple[Costly, ...] = ()
    unknown: str = ""

    def lines(self) -> list[str]:
        if self.step_s is None:
            return [f"where the time goes: {self.unknown}"]
        step_s = max(self.step_s, _ROUNDING_S)
        lines = [f"where the time goes, simulated, of {seconds_text(self.step_s)}:"]
        lines += table([(seconds_text(each.seconds), f"{each.seconds / step_s:.1%}", each.what) for each in self.parts])
        busy = ((self.communication_s, self.exposed_s, "communication"), (self.copy_s, self.exposed_copy_s, "copies"))
        lines += [
            f"  {what}: {seconds_text(all_s)}, of which {seconds_text(exposed_s)} exposed"
            for all_s, exposed_s, what in busy
            if all_s
        ]
        bound_s = max(self.bound_s, _ROUNDING_S)
        lines.append(
            f"  bound: {seconds_text(self.bound_s)}, which no schedule of the same operations beats; the step "
        )
        lines[-1] += f"is {100 * (self.step_s / bound_s - 1):.1f} % above"
        for each in self.ceilings:
            mfu = "" if each.mfu is None else f", MFU {percent_text(each.mfu)}"
            beaten = "; no schedule of the same operations is below the bound" * (each.seconds < self.bound_s)
            lines.append(f"  ceiling, {each.given}: {seconds_text(each.seconds)}{mfu}{beaten}")
        for title, costly in (("kernels that cost most", self.kernels), ("waits that cost most", self.waits)):
            lines += [f"  {title}:"] if costly else []
            lines += table([(seconds_text(each.seconds), f"{each.times}x", _said(each)) for each in costly], "    ")
        return [*lines, *[f"  unknown: {self.unknown}"] * bool(self.unknown)]


def _said(each: Costly) -> str:
    return f"{each.what}  {line_text(each.line)}" if each.line else each.what


def seconds_of(planned: Planned | None, achieves: Utilisation | None) -> Seconds:
    """Of the simulation that chose the plan; of a plan from elsewhere as far as it says."""
    if planned is None or planned.plan.prediction is None:
        return Seconds(None, unknown="unknown, nothing was compiled to plan the step")
    expected = planned.plan.prediction
    if planned.evaluation is None:
        return _foretold(expected)
    run, origins = planned.evaluation.simulation, Origins.of(planned.evaluation.module, planned.program)
    parts = [Share(str(part), seconds) for part, seconds in sorted(run.totals.kernels_s.items()) if seconds]
    parts.sort(key=lambda part: -part.seconds)
    waits = sorted(run.totals.exposed_s.items(), key=lambda item: -item[1])
    parts += [Share(f"waiting for {_kind(stream)}", seconds) for stream, seconds in waits if seconds]
    rest_s = run.step_s - sum(part.seconds for part in parts)
    parts += [Share("after the last kernel", rest_s)] if rest_s > _ROUNDING_S else []
    return Seconds(
        run.step_s,
        tuple(parts),
        run.communication_s,
        run.exposed_communication_s,
        run.copy_s,
        run.exposed_copy_s,
        run.bound_s,
        _ceilings(run, achieves),
        _kernels(run),
        _waits(run, origins),
        _uncounted(run),
    )


def _uncounted(run: Simulation) -> str:
    """What is not known of loops whose length is found as they run."""
    loops = [operation_text(loop.op_name) or loop.name for loop in run.loops if not loop.is_counted]
    which = ", ".join(f"{name} {times}x" if times > 1 else name for name, times in Counter(loops).items())
    return (
        f"how often loops run whose length depends on values: {which}; one iteration of each is counted"
        if loops
        else ""
    )


def _foretold(expected: Prediction) -> Seconds:
    parts = (
        Share("kernels", expected.compute_s),
        Share("waiting for communication", expected.exposed_s),
        Share("waiting for copies", expected.exposed_copy_s),
        Share(
            "after the last kernel", expected.step_s - expected.compute_s - expected.exposed_s - expected.exposed_copy_s
        ),
    )
    return Seconds(
        expected.step_s,
        tuple(part for part in parts if abs(part.seconds) > _ROUNDING_S),
        expected.communication_s,
        expected.exposed_s,
        expected.copy_s,
        expected.exposed_copy_s,
        expected.bound_s or max(expected.compute_s, expected.communication_s),
        unknown="which kernels and waits cost most, what is computed again, and what if all were hidden: the plan was "
        "not made in this run",
    )


def _ceilings(run: Simulation, achieves: Utilisation | None) -> tuple[Ceiling, ...]:
    """Beside all of the others kernels lose at least ``delayed_s``, instead of what they do beside those hidden now."""
    alone_s, again_s = run.compute_s - run.totals.slowed_s, run.totals.kernels_s.get(Part.AGAIN, 0.0)
    hidden_s = alone_s + run.totals.delayed_s
    said = "if all communication and copies were hidden"
    if run.totals.delayed_s:
        lost = f"{seconds_text(run.totals.delayed_s)} that those beside them cost at least"
        said += f" (kernels alone {seconds_text(alone_s)}, and {lost})"
    each = [(said, hidden_s)]
    each += [("if in addition nothing were computed again", hidden_s - again_s)] if again_s else []
    return tuple(Ceiling(said, seconds, achieves and achieves.mfu(seconds)) for said, seconds in each)


def _kind(stream: Stream) -> str:
    return f"copies {stream}" if stream.is_copy else str(stream)


def _kernels(run: Simulation) -> tuple[Costly, ...]:
    kernels = [event for event in run.timeline if event.stream is Stream.COMPUTE]
    said = ((event, operation_text(event.op_name) or event.name, users_line(event.source)) for event in kernels)
    return _costliest((what, line, event.end_s - event.start_s, event.trips) for event, what, line in said)


def _waits(run: Simulation, origins: Origins) -> tuple[Costly, ...]:
    said = ((wait, *origins.said(wait.name, wait.op_name, wait.source)) for wait in run.waits)
    return _costliest((f"{_kind(wait.stream)}: {what}", line, wait.seconds, wait.trips) for wait, what, line in said)


def _costliest(each: Iterable[tuple[str, str, float, int]]) -> tuple[Costly, ...]:
    """Those of one name and line together, most first."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    times: dict[tuple[str, str], int] = defaultdict(int)
    for what, line, one_s, trips in each:
        key = what, line
        seconds[key] += trips * one_s
        times[key] += trips
    worst = sorted(seconds, key=lambda key: -seconds[key])[:_MOST]
    return tuple(Costly(*key, seconds[key], times[key]) for key in worst)
