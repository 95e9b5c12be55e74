"""What playing a program on streams tells: seconds and bytes, in sum, by loop and one operation at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.streams import REMATERIALIZED, Part, Queue, Stream, Timing
from jax_deepcompile.hlo.reader import Module
from jax_deepcompile.summary import Summarized, Summary, size_text

T = TypeVar("T")


@dataclass(frozen=True)
class Totals:
    """Sums over a program or a part of it.

    Attributes:
      compute_s: on the compute stream, without waiting.
      communication_s: of collectives, hidden or not.
      copy_s: of copies between device and host, hidden or not.
      gathered_bytes: whole results of all-gathers.
      reduced_bytes: whole operands of reduce-scatters and all-reduces.
      exposed_s: what compute waited for each of the other streams.
      kernels_s: ``compute_s`` by what kernels are a part of.
      slowed_s: of compute, what kernels took longer because other streams ran beside them.
      alone_s: of the operations on each queue, as fast as they are alone.
      delayed_s: what the other streams cost kernels at least, by running at all, if none of it is exposed.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    copy_s: float = 0.0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    exposed_s: Mapping[Stream, float] = field(default_factory=dict)
    kernels_s: Mapping[Part, float] = field(default_factory=dict)
    slowed_s: float = 0.0
    alone_s: Mapping[Queue, float] = field(default_factory=dict)
    delayed_s: float = 0.0

    @property
    def exposed_communication_s(self) -> float:
        return sum((seconds for stream, seconds in self.exposed_s.items() if not stream.is_copy), 0.0)

    @property
    def exposed_copy_s(self) -> float:
        return sum((seconds for stream, seconds in self.exposed_s.items() if stream.is_copy), 0.0)

    @classmethod
    def of(cls, timing: Timing, seconds: float) -> Totals:
        """Of one operation that took ``seconds`` beside others, but for what is waited for."""
        alone_s = {timing.stream.queue: timing.seconds}
        if timing.stream is Stream.COMPUTE:
            slowed_s, kernels_s = seconds - timing.seconds, {timing.part: seconds}
            return cls(compute_s=seconds, slowed_s=slowed_s, alone_s=alone_s, kernels_s=kernels_s)
        least = {"alone_s": alone_s, "delayed_s": timing.seconds * timing.taken.least}
        if timing.stream.is_copy:
            return cls(copy_s=seconds, **least)
        gathered = timing.bytes if timing.stream is Stream.ALL_GATHER else 0
        reduced = timing.bytes if timing.stream in (Stream.REDUCE_SCATTER, Stream.ALL_REDUCE) else 0
        return cls(communication_s=seconds, gathered_bytes=gathered, reduced_bytes=reduced, **least)

    @classmethod
    def of_wait(cls, stream: Stream, waited_s: float) -> Totals:
        """Of compute that waits for an operation on ``stream``."""
        return cls() if stream is Stream.COMPUTE or not waited_s else cls(exposed_s={stream: waited_s})

    def plus(self, other: Totals, times: int = 1) -> Totals:
        """The sum of this and ``times`` the other."""
        return Totals(**{name: _plus(mine, getattr(other, name), times) for name, mine in vars(self).items()})


def _plus(mine: Any, other: Any, times: int) -> Any:
    if not isinstance(mine, Mapping):
        return mine + times * other
    return {key: mine.get(key, 0.0) + times * other.get(key, 0.0) for key in (mine | other)}


@dataclass(frozen=True)
class Event:
    """One operation on one stream.

    Attributes:
      stream: what it belongs to.
      name: of the instruction.
      start_s: from the beginning of the step; in a loop, in the trip that is shown.
      end_s: likewise.
      trips: how often it runs in a step.
      op_name: the path of modules and primitives it came from.
      source: the user's ``file:line``.
      kind: its opcode, without ``-start``.
      sent_bytes: of a collective: what one device sends to others each time, in a ring.
      loop: name of the innermost while it is in; empty outside of loops.
      part: of a kernel: what it is a part of.
      is_within_node: of a collective: whether it is known that all that take part in it share a node.
    """

    stream: Stream
    name: str
    start_s: float
    end_s: float
    trips: int = 1
    op_name: str = ""
    source: str = ""
    kind: str = ""
    sent_bytes: int = 0
    loop: str = ""
    part: Part = Part.OTHER
    is_within_node: bool = False


@dataclass(frozen=True)
class Wait:
    """What the compute stream waited for.

    Attributes:
      stream: that it waited for.
      name, op_name, source: of the operation on it; see ``Event``; empty where that is not known.
      start_s: from the beginning of the step; in a loop, in the trip that is shown.
      seconds: that it waited each time.
      trips: how often in a step.
      loop: name of the innermost while it is in; empty outside of loops.
    """

    stream: Stream
    name: str
    op_name: str
    source: str
    start_s: float
    seconds: float
    trips: int = 1
    loop: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


@dataclass(frozen=True)
class Repeated:
    """Trips of a loop that go alike.

    Attributes:
      trips: how many.
      paces: by how many seconds operations on each queue are later from one trip to the next.
      body: what the first of them plays, in the order of issue.
    """

    trips: int
    paces: Mapping[Queue, float]
    body: tuple[Event | Repeated, ...]


def unrolled(played: Sequence[Event | Repeated], delays: Mapping[Queue, float]) -> Iterator[Event]:
    """Every operation as often as it runs, with everything on a queue later by its delay."""
    for each in played:
        if isinstance(each, Event):
            delay_s = delays[each.stream.queue]
            yield replace(each, start_s=each.start_s + delay_s, end_s=each.end_s + delay_s, trips=1)
        else:
            for trip in range(each.trips):
                yield from unrolled(each.body, {queue: delays[queue] + trip * each.paces[queue] for queue in Queue})


@dataclass(frozen=True)
class Loop:
    """A while.

    Attributes:
      name: of the instruction.
      op_name: the path of modules and primitives it came from.
      trip_count: how often it runs its body.
      is_counted: whether the program says so; if not, one trip is assumed.
      trip_s: of one trip.
      trip: sums over one trip.
      executions: how often the loop itself runs in a step.
      is_innermost: whether no other loop is in it.
      began_s: when its first trip begins, from the beginning of the step; in a loop, in the trip that is shown.
      shown_s: when that trip of it begins which the timeline shows: the first that is like all after it. Before it
        are those that wait for what was under way before the loop, or find nothing that a trip left for them.
      parent: name of the innermost loop that it is in; empty outside of loops.
    """

    name: str
    op_name: str
    trip_count: int
    is_counted: bool
    trip_s: float
    trip: Totals
    executions: int = 1
    is_innermost: bool = True
    began_s: float = 0.0
    shown_s: float = 0.0
    parent: str = ""

    @property
    def coverable(self) -> float:
        """The share of a trip's communication that its compute can run beside."""
        return min(1.0, self.trip.compute_s / self.trip.communication_s) if self.trip.communication_s else 1.0

    @property
    def hideable_s(self) -> float:
        """What a trip takes longer than its busiest stream: a better schedule of the same operations may save it."""
        return max(0.0, self.trip_s - max(self.trip.compute_s, self.trip.communication_s, self.trip.copy_s))


def _total(of: Callable[[Totals], T]) -> T:
    """The attribute of a simulation that is ``of`` its totals."""
    return cast(T, property(lambda simulation: of(simulation.totals)))


@dataclass(frozen=True, repr=False)
class Simulation(Summarized):
    """What a step costs.

    Attributes:
      step_s: from its first operation to its last.
      totals: sums over the step.
      loops: each while, inner ones before the one they are in.
      timeline: what ran when, in the order of issue; bodies of loops once.
      memory: what is in the device's memory when.
      is_scheduled: whether XLA's schedule of the compiled step was played. If not, its program was, before compilation:
        every kernel reads and writes memory, for want of XLA's fusions, and collectives begin as early as they can.
      least_s: what its operations take at least, as some need others; 0 where that was not looked at.
      waits: what of the timeline's communication and copies is exposed; bodies of loops once.
      played: what ran when, as ``timeline``, but with all trips of loops.
      module: whose schedule was played; None if none was.
      is_measured: whether nothing was played and this is what a device ran; what it sent, and its memory, are as
        simulated.
    """

    step_s: float
    totals: Totals
    loops: tuple[Loop, ...]
    timeline: tuple[Event, ...]
    memory: MemoryUse
    least_s: float = 0.0
    is_scheduled: bool = True
    waits: tuple[Wait, ...] = ()
    played: tuple[Event | Repeated, ...] = ()
    module: Module | None = field(default=None, compare=False)
    is_measured: bool = False

    compute_s = _total(lambda totals: totals.compute_s)
    communication_s = _total(lambda totals: totals.communication_s)
    exposed_communication_s = _total(lambda totals: totals.exposed_communication_s)
    copy_s = _total(lambda totals: totals.copy_s)
    exposed_copy_s = _total(lambda totals: totals.exposed_copy_s)
    gathered_bytes = _total(lambda totals: totals.gathered_bytes)
    reduced_bytes = _total(lambda totals: totals.reduced_bytes)

    def unrolled(self) -> Iterator[Event]:
        """Every operation of the step as often as it runs, in the order of issue; each event is of one trip."""
        return unrolled(self.played, dict.fromkeys(Queue, 0.0))

    @property
    def sent_bytes(self) -> int:
        """What one device sends to others in a step, every collective done as a ring."""
        return sum(event.trips * event.sent_bytes for event in self.timeline)

    @property
    def launches(self) -> Counter[str]:
        """How often each kind of collective is launched in a step."""
        counts: Counter[str] = Counter()
        for event in self.timeline:
            if event.stream is not Stream.COMPUTE and not event.stream.is_copy:
                counts[event.kind] += event.trips
        return counts

    @property
    def rematerialized_s(self) -> float:
        """Seconds of kernels that XLA's own rematerialisation pass repeats, to save memory; it marks their names."""
        again = [
            event for event in self.timeline if event.stream is Stream.COMPUTE and REMATERIALIZED.search(event.name)
        ]
        return sum((event.trips * (event.end_s - event.start_s) for event in again), 0.0)

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @property
    def bound_s(self) -> float:
        """What no schedule of the same operations beats, each queue's one after another and some after others.

        Kernels are as fast as alone, but for the least that collectives and copies beside them cost.
        """
        alone_s = self.compute_s - self.totals.slowed_s
        return max(alone_s + self.totals.delayed_s, *self.totals.alone_s.values(), self.least_s)

    @property
    def attainable_s(self) -> float:
        """What the step takes once innermost loops are scheduled so that their busiest stream is never idle."""
        inner = (loop for loop in self.loops if loop.is_innermost)
        return self.step_s - sum(loop.executions * loop.trip_count * loop.hideable_s for loop in inner)

    def __str__(self) -> str:
        return (
            f"step {self.step_s:.3f} s simulated {self._of}: compute {self.compute_s:.3f}, exposed communication "
            f"{self.exposed_communication_s:.3f} of {self.communication_s:.3f}{self._exposed_kinds()}, exposed copies "
            f"{self.exposed_copy_s:.3f} of {self.copy_s:.3f}; {self.gathered_bytes / 1e9:.1f} GB gathered, "
            f"{self.reduced_bytes / 1e9:.1f} GB reduced; {self.peak_bytes / 2**30:.1f} GiB"
        )

    def _summary(self) -> Summary:
        rows = (
            ("step", f"{self.step_s:.4g} s"),
            ("compute", f"{self.compute_s:.4g} s"),
            ("communication", f"{self.communication_s:.4g} s, {self.exposed_communication_s:.4g} s exposed"),
            ("copies", f"{self.copy_s:.4g} s, {self.exposed_copy_s:.4g} s exposed" if self.copy_s else ""),
            ("bytes", f"{size_text(self.gathered_bytes)} gathered, {size_text(self.reduced_bytes)} reduced"),
            ("peak memory", f"{size_text(self.peak_bytes)} a device"),
            ("details", f"{len(self.loops)} loops in .loops, {len(self.timeline)} events in .timeline"),
        )
        return Summary(f"Simulation {self._of}", rows)

    @property
    def _of(self) -> str:
        return "of XLA's schedule" if self.is_scheduled else "before compilation, without XLA's fusions and schedule"

    def _exposed_kinds(self) -> str:
        waited = [(stream, seconds) for stream, seconds in sorted(self.totals.exposed_s.items()) if not stream.is_copy]
        return f" ({', '.join(f'{stream} {seconds:.3f}' for stream, seconds in waited)})" if waited else ""


def gaps(intervals: Iterable[tuple[float, float]], until_s: float) -> Iterator[tuple[float, float]]:
    """What none of ``intervals`` has of the time from 0 to ``until_s``."""
    for (_, start_s), (end_s, _) in pairwise([(0.0, 0.0), *merged(intervals), (until_s, until_s)]):
        if end_s > start_s:
            yield start_s, end_s


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union, as intervals that do not touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
