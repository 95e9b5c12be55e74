"""Positions of a schedule as times: how much memory a simulated step needs when, and which block is where how long."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from jax_deepcompile.costs.held import Content, contents
from jax_deepcompile.costs.simulation import Loop, Simulation
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.report.peak import role_of

_LEAST = 2e-4
"""The share of the peak that a block takes at least, to be drawn."""


def live_bytes(simulation: Simulation) -> Iterator[tuple[float, str, int]]:
    """From when on, in which loop, how much is needed, where that changes; in a loop, in the trip that is shown.

    Nothing of what is not compiled.
    """
    memory, last = simulation.memory, None
    if not memory.loops:
        return
    for at_s, loop, size in zip(position_times(simulation), memory.loops, memory.live_bytes, strict=True):
        if (loop, size) != last:
            yield at_s, loop, size
        last = loop, size


@dataclass(frozen=True)
class Block:
    """A rectangle of time and addresses.

    Attributes:
      begin_s, end_s: when memory is needed; in a loop, in the trip that is shown.
      loop: the innermost while it is in; empty outside of loops.
      address, bytes: where it is, from the beginning of the memory for temporaries, and how much.
      made_by: the operation whose result is in it, the first of them.
      role: what it is for, as ``explain`` says.
    """

    begin_s: float
    end_s: float
    loop: str
    address: int
    bytes: int
    made_by: str
    role: str


def blocks(simulation: Simulation, batch: Collection[int], words: frozenset[int]) -> Iterator[Block]:
    """Each that is worth drawing. What goes into a loop, or comes out of one, is in parts: outside, and in a trip.

    Args:
      batch: which of the step's inputs hold examples.
      words: how many words there are, of each vocabulary.
    """
    memory, module = simulation.memory, simulation.module
    if module is None:
        return
    times = position_times(simulation)
    ends = {event.name: event.end_s for event in simulation.timeline if event.stream is Stream.COMPUTE}
    ends |= {loop.name: _ended_s(loop) for loop in simulation.loops}
    loops, last = {loop.name: loop for loop in simulation.loops}, len(times) - 1
    drawn = [each for each in memory.held if each.bytes >= _LEAST * memory.peak_bytes]
    for content, role in _alike(contents(module, drawn, batch), words):
        begin, end = content.begin, min(content.end, last)
        end_s = simulation.step_s if content.end > last else max(times[end], ends.get(memory.names[end], 0.0))
        for begin_s, until_s, loop in _parts(times[begin], end_s, memory.loops[begin], memory.loops[end], loops):
            if until_s > begin_s:
                yield Block(begin_s, until_s, loop, content.address, content.bytes, content.name, role)


def _alike(held: Iterable[Content], words: frozenset[int]) -> list[tuple[Content, str]]:
    """What it is for; what lies in one place for the same, one after another, as one."""
    joined: list[tuple[Content, str]] = []
    for each in held:
        role, (before, of) = role_of(each, words), joined[-1] if joined else (each, "")
        if of == role and (before.address, before.bytes, before.end + 1) == (each.address, each.bytes, each.begin):
            joined[-1] = replace(before, end=each.end), role
        else:
            joined.append((each, role))
    return joined


def position_times(simulation: Simulation) -> list[float]:
    """When the compute stream comes to each of ``simulation.memory.names``; in a loop, in the trip that is shown."""
    memory, loops = simulation.memory, {loop.name: loop for loop in simulation.loops}
    starts = {event.name: event.start_s for event in simulation.timeline if event.stream is Stream.COMPUTE}
    coming = {loop.name: loop.shown_s + loop.trip_s for loop in simulation.loops} | {"": simulation.step_s}
    times = [0.0] * len(memory.loops)
    for place in reversed(range(len(memory.loops))):
        name, loop = memory.names[place], memory.loops[place]
        if name in loops:  # what it runs comes before it
            coming[loop] = loops[name].began_s
        elif name in starts:
            coming[loop] = starts[name]
        times[place] = coming.get(loop, simulation.step_s)
    return times


def _parts(
    begin_s: float, end_s: float, first: str, last: str, loops: dict[str, Loop]
) -> Iterator[tuple[float, float, str]]:
    """From ``begin_s`` in the loop ``first`` to ``end_s`` in the loop ``last``, in each loop on the way by itself."""
    around = _around(last, loops)
    while first not in around:
        loop = loops[first]
        yield begin_s, loop.shown_s + loop.trip_s, first
        begin_s, first = _ended_s(loop), loop.parent
    while last != first:
        loop = loops[last]
        yield loop.shown_s, end_s, last
        end_s, last = loop.began_s, loop.parent
    yield begin_s, end_s, first


def _ended_s(loop: Loop) -> float:
    before = 1 if loop.shown_s > loop.began_s else 0
    return loop.shown_s + (loop.trip_count - before) * loop.trip_s


def _around(name: str, loops: dict[str, Loop]) -> list[str]:
    """The loop called ``name``, those around it, and the step itself."""
    found = [name]
    while name:
        name = loops[name].parent if name in loops else ""
        found.append(name)
    return found
