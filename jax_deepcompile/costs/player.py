"""Plays operations on streams: what both simulators share, of compiled programs and of those still to be compiled.

The compute stream runs kernels one after another. Collectives of each kind, and copies in each direction between device
and host, have a stream of their own; streams that share a queue, as all collectives but permutations do, wait for each
other. What the compute stream waits for them is exposed. Kernels are slower while other streams run: each queue takes
from them what the last operation that it was given takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeAlias, TypeVar

from jax_deepcompile.costs.overlap import NONE, Taken
from jax_deepcompile.costs.simulation import Event, Loop, Repeated, Totals, Wait
from jax_deepcompile.costs.streams import Queue, Stream, Timing

T = TypeVar("T")

Due: TypeAlias = Mapping[Stream, float]
"""When the last operation that a value waits for ends, on each stream that has one, in seconds."""


@dataclass(frozen=True)
class Operation:
    """What the timeline says of an operation; see ``Event``."""

    name: str
    op_name: str
    source: str


@dataclass
class Player:
    """Where the streams are, and what they have played.

    Attributes:
      now_s: when the compute stream is free.
      free: when each of the other queues has done all it was given.
      taken: what each of them takes from kernels until then.
      trips: how often a step runs what is being played.
      loop: the innermost loop that it is in, by name; empty where events do not say.
      is_recorded: whether events, loops and waits are kept.
      totals: sums so far.
      events, loops, waits: what has been played, bodies of loops once.
      played: likewise, with all trips.
    """

    now_s: float = 0.0
    free: dict[Queue, Due] = field(default_factory=dict)
    taken: dict[Queue, Taken] = field(default_factory=dict)
    trips: int = 1
    loop: str = ""
    is_recorded: bool = True
    totals: Totals = field(default_factory=Totals)
    events: list[Event] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    played: list[Event | Repeated] = field(default_factory=list)

    def play(self, timing: Timing, earliest_s: float, operands: Due, operation: Callable[[], Operation]) -> Due:
        """Runs a kernel, or sets another operation under way; tells when what it makes is there.

        Args:
          timing: how it runs.
          earliest_s: before which nothing but a kernel begins.
          operands: what it waits for.
          operation: what to record of it.
        """
        stream = timing.stream
        if stream is Stream.COMPUTE:
            self.wait(operands)
            begin_s, after = self.now_s, {}
            seconds = self._kernel_s(timing)
            self.now_s = begin_s + seconds
        else:
            after = merged([operands, self.free.get(stream.queue, {})])
            begin_s = max([earliest_s, *after.values()])
            seconds = self._other_s(timing, begin_s)
        due = {**after, stream: begin_s + seconds}
        if stream is not Stream.COMPUTE:
            self.free[stream.queue], self.taken[stream.queue] = due, timing.taken
        self.totals = self.totals.plus(Totals.of(timing, seconds))
        recorded = operation()
        what = recorded.op_name, recorded.source, timing.kind, timing.sent_bytes
        where = self.loop, timing.part, timing.is_within_node
        event = Event(stream, recorded.name, begin_s, due[stream], self.trips, *what, *where)
        self.played.append(event)
        if self.is_recorded:
            self.events.append(event)
        return due

    def _kernel_s(self, timing: Timing) -> float:
        """What a kernel takes that begins now, slower as long as other queues are busy."""
        at_s, left_s = self.now_s, timing.seconds
        ends = sorted((max(due.values()), queue) for queue, due in self.free.items())
        for place, (busy_s, _) in enumerate(ends):
            beside = sum((self.taken[queue] for _, queue in ends[place:] if queue in self.taken), NONE)
            slowdown = beside.slowdown(timing.is_memory_bound)
            if busy_s <= at_s or slowdown == 1:
                continue
            if left_s * slowdown <= busy_s - at_s:
                return at_s - self.now_s + left_s * slowdown
            left_s -= (busy_s - at_s) / slowdown
            at_s = busy_s
        return at_s - self.now_s + left_s

    def _other_s(self, timing: Timing, begin_s: float) -> float:
        """What another operation takes; a copy is slower as long as the other direction is busy."""
        beside_s = 0.0
        if timing.stream.is_copy:
            other = Queue.FROM_HOST if timing.stream is Stream.TO_HOST else Queue.TO_HOST
            beside_s = max(0.0, max(self.free.get(other, {}).values(), default=0.0) - begin_s)
        return timing.seconds + min(beside_s / timing.both_ways, timing.seconds) * (timing.both_ways - 1)

    def wait(self, due: Due, operation: Operation | None = None) -> None:
        """Holds the compute stream until all that ``due`` names is done; ``operation``, where that is known, is it."""
        for stream, end_s in sorted(due.items(), key=lambda item: item[1]):
            if end_s > self.now_s:
                waited_s = end_s - self.now_s
                self.totals = self.totals.plus(Totals.of_wait(stream, waited_s))
                if self.is_recorded and stream is not Stream.COMPUTE:
                    said = ("", "", "") if operation is None else (operation.name, operation.op_name, operation.source)
                    self.waits.append(Wait(stream, *said, self.now_s, waited_s, self.trips, self.loop))
                self.now_s = end_s

    def longest(self, branches: Iterable[Callable[[Self], T]], end_s: Callable[[Self, T], float]) -> T:
        """Plays that one of ``branches`` which ends last by ``end_s``, and returns what it returns."""
        played = []
        for play in branches:
            fresh = {name: [] for name in ("events", "loops", "waits", "played")}
            branch = replace(self, free=dict(self.free), taken=dict(self.taken), **fresh)
            played.append((branch, play(branch)))
        branch, result = max(played, key=lambda each: end_s(*each))
        self.now_s, self.free, self.taken, self.totals = branch.now_s, branch.free, branch.taken, branch.totals
        self.events += branch.events
        self.loops += branch.loops
        self.waits += branch.waits
        self.played += branch.played
        return result

    @property
    def ended_s(self) -> float:
        """When every stream is done."""
        return max([self.now_s, *merged(self.free.values()).values()])


def merged(dues: Iterable[Due]) -> Due:
    """When all of ``dues`` are there."""
    latest: dict[Stream, float] = {}
    for due in dues:
        for stream, end_s in due.items():
            latest[stream] = max(end_s, latest.get(stream, 0.0))
    return latest
