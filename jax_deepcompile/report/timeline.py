"""What traces and plots read off a step's operations: what compute waits for, and bytes over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from jax_deepcompile.costs.simulation import Event, Simulation, gaps
from jax_deepcompile.costs.streams import Stream

_NS_PER_S = 1e9


@dataclass(frozen=True)
class Wait:
    """The compute stream stands idle until ``cause`` ends; None where mostly nothing runs that was recorded."""

    start_s: float
    end_s: float
    cause: Event | None


def waits(events: Iterable[Event]) -> Iterator[Wait]:
    """The gaps between kernels, from the beginning of the step to the end of all ``events``.

    Of what runs meanwhile the cause is what ends with the gap. Where nothing does to the nanosecond, as in what was
    measured, it is what runs longest.
    """
    events = list(events)
    ended_s = max((event.end_s for event in events), default=0.0)
    kernels = ((event.start_s, event.end_s) for event in events if event.stream is Stream.COMPUTE)
    others = deque(sorted((e for e in events if e.stream is not Stream.COMPUTE), key=lambda event: event.start_s))
    running: list[Event] = []
    for before_s, after_s in gaps(kernels, ended_s):
        if ns(after_s) > ns(before_s):
            while others and others[0].start_s < after_s:
                running.append(others.popleft())
            running = [event for event in running if event.end_s > before_s]
            yield Wait(before_s, after_s, _cause(running, before_s, after_s))


def _cause(running: Iterable[Event], start_s: float, end_s: float) -> Event | None:
    def fills(event: Event) -> tuple[bool, float]:
        return ns(event.end_s) == ns(end_s), min(event.end_s, end_s) - max(event.start_s, start_s)

    cause = max(running, key=fills, default=None)
    return cause if cause is not None and fills(cause) >= (False, (end_s - start_s) / 2) else None


def live_bytes(simulation: Simulation) -> tuple[list[float], list[int]]:
    """Seconds at which kernels begin, and the most bytes of device memory that are needed from then to the next one."""
    memory = simulation.memory
    positions = {name: place for place, name in enumerate(memory.names)}
    kernels = [event for event in simulation.unrolled() if event.stream is Stream.COMPUTE and event.name in positions]
    places = [positions[kernel.name] for kernel in kernels]
    stretches = [slice(here, max(here + 1, after)) for here, after in pairwise([*places, 0])]
    return [kernel.start_s for kernel in kernels], [max(memory.live_bytes[stretch]) for stretch in stretches]


def ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)
