"""A run that was traced, told as a simulation is: to stand beside one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.simulation import Event, Simulation, Totals, Wait, gaps
from jax_deepcompile.costs.streams import Part, Stream


def measured_run(events: Sequence[Event], simulated: Simulation) -> Simulation:
    """What one device ran when, of a step that ``simulated`` knows by the names of its operations.

    Args:
      events: as they ran, each trip of a loop by itself; see ``timelines_of``.
      simulated: says what operations are a part of and what they send, which no trace does.

    Returns:
      No loops, and nothing of memory but its sizes: neither was measured.
    """
    known = {event.name: event for event in simulated.timeline}
    ran = [
        replace(known.get(each.name, each), start_s=each.start_s, end_s=each.end_s, trips=1, loop="") for each in events
    ]
    kernels_s: defaultdict[Part, float] = defaultdict(float)
    other_s = {True: 0.0, False: 0.0}
    for each in ran:
        if each.stream is Stream.COMPUTE:
            kernels_s[each.part] += each.end_s - each.start_s
        else:
            other_s[each.stream.is_copy] += each.end_s - each.start_s
    waits, exposed_s = tuple(_waits(ran)), defaultdict(float)
    for wait in waits:
        exposed_s[wait.stream] += wait.seconds
    seconds = {"compute_s": sum(kernels_s.values()), "communication_s": other_s[False], "copy_s": other_s[True]}
    sizes = simulated.memory.argument_bytes, simulated.memory.output_bytes, simulated.memory.temporary_bytes
    memory = MemoryUse(*sizes, simulated.memory.host_bytes, names=(), live_bytes=(), peak_values=())
    step_s = max((each.end_s for each in ran), default=0.0)
    totals = Totals(**seconds, exposed_s=exposed_s, kernels_s=kernels_s)
    return Simulation(step_s, totals, (), tuple(ran), memory, waits=waits, played=tuple(ran), is_measured=True)


def _waits(events: Sequence[Event]) -> Iterator[Wait]:
    """For each time without a kernel, that one of the other operations which fills most of it."""
    others = [each for each in events if each.stream is not Stream.COMPUTE]
    kernels = [(each.start_s, each.end_s) for each in events if each.stream is Stream.COMPUTE]
    for start_s, end_s in gaps(kernels, max((each.end_s for each in events), default=0.0)):
        beside = {min(end_s, each.end_s) - max(start_s, each.start_s): each for each in others}
        seconds = max(beside, default=0.0)
        if seconds > 0:
            of = beside[seconds]
            yield Wait(of.stream, of.name, of.op_name, of.source, max(start_s, of.start_s), seconds)
