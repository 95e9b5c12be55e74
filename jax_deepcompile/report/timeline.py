"""What traces and plots read off a step's operations: where each comes from, what waits for it, bytes over time."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from jax_deepcompile.costs.simulation import Event, Simulation
from jax_deepcompile.costs.streams import Stream

_NS_PER_S = 1e9
_TRANSFORMED = re.compile(r"\w+\(([^()]*)\)")
_COMBINED = re.compile(r"(?P<outside>.*?/)?\((?P<first>[^:]*):.*\)")
_NOT_SCOPES = {"", "shard_map", "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation"}
_JITTED = re.compile(r"(jit|pjit)\([^()]*\)/?")


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
    kernels = merged((event.start_s, event.end_s) for event in events if event.stream is Stream.COMPUTE)
    others = deque(sorted((e for e in events if e.stream is not Stream.COMPUTE), key=lambda event: event.start_s))
    running: list[Event] = []
    for (_, before_s), (after_s, _) in pairwise([(0.0, 0.0), *kernels, (ended_s, ended_s)]):
        if _ns(after_s) > _ns(before_s):
            while others and others[0].start_s < after_s:
                running.append(others.popleft())
            running = [event for event in running if event.end_s > before_s]
            yield Wait(before_s, after_s, _cause(running, before_s, after_s))


def _cause(running: Iterable[Event], start_s: float, end_s: float) -> Event | None:
    def fills(event: Event) -> tuple[bool, float]:
        return _ns(event.end_s) == _ns(end_s), min(event.end_s, end_s) - max(event.start_s, start_s)

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


def scope(op_name: str) -> tuple[str, str]:
    """The user's modules and the primitive in a path such as ``jit(step)/jvp(Llama)/layers/mlp/dot_general``.

    Of something made of several, that of the first.

    >>> scope("jit(step)/shard_map/transpose(jvp(Llama))/while/body/closed_call/layers/mlp/up/dot_general")
    ('Llama/layers/mlp/up', 'dot_general')
    >>> scope("jit(step)/(jvp()/embed/all_gather:rematted_computation/mlp/all_gather)")
    ('embed', 'all_gather')
    """
    path = op_name.partition(";")[0]
    if combined := _COMBINED.fullmatch(path):
        path = (combined["outside"] or "") + combined["first"]
    path = _JITTED.sub("", path)
    while path != (path := _TRANSFORMED.sub(r"\1", path)):
        pass
    *scopes, primitive = path.split("/")
    return "/".join(each for each in scopes if each not in _NOT_SCOPES), primitive


def title(event: Event) -> str:
    """Where ``event`` comes from, in the user's words; the instruction's name where nobody knows."""
    return " ".join(filter(None, scope(event.op_name))) or event.name


def line(event: Event) -> str:
    """The user's line, its file as seen from here if that is shorter; empty where nobody knows."""
    path, colon, number = event.source.rpartition(":")
    return min(path, os.path.relpath(path), key=len) + colon + number if path else event.source


def _ns(seconds: float) -> int:
    return round(seconds * _NS_PER_S)


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union, as intervals that do not touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
