"""One simulated step as the page draws it: plain numbers and names, columns rather than rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax_deepcompile._jax_compat import users_line
from jax_deepcompile.costs.simulation import Event, Loop, Simulation
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.costs.utilisation import Utilisation
from jax_deepcompile.ir.program import Program, Role
from jax_deepcompile.report.origins import Origins
from jax_deepcompile.report.page.memory import Block, blocks, live_bytes
from jax_deepcompile.report.peak import batch_of, held_blocks, vocabularies
from jax_deepcompile.report.timeline import ns
from jax_deepcompile.report.words import line_text

WITHIN = " in a node"

REST = "first trips of loops, and what ends after the last kernel"
UNRECORDED = "waits for what nobody recorded"
"""The seconds that no line has, of a step that was simulated and of one that was measured."""

NO_LINE = "no line of yours"

ARGUMENTS = "state, batch and other arguments"

GAPS = "results with memory of their own, and gaps between blocks"
"""The bytes of a peak that no line has, nor an argument."""


@dataclass(frozen=True)
class Run:
    """A step simulated, and what is known of it beside its schedule.

    Attributes:
      program: in the local view.
      words: how many there are, of each vocabulary.
      tokens: that a device learns from; 0 where it has none.
      achieves: what its model FLOPs and examples are, if they are known.
    """

    simulation: Simulation
    program: Program
    words: frozenset[int] = frozenset()
    tokens: float = 0
    achieves: Utilisation | None = None

    @classmethod
    def of(cls, simulation: Simulation, whole: Program, local: Program, achieves: Utilisation | None) -> Run:
        """Of a step that is ``whole`` in the global view."""
        batch = [port.shape for port in local.inputs if port.role is Role.BATCH and "int" in port.dtype]
        tokens = max((math.prod(shape) for shape in batch if len(shape) == 2), default=0)
        return cls(simulation, local, vocabularies(whole), tokens / local.mesh.devices.size, achieves)


@dataclass
class Words:
    """Texts, each once, by number."""

    numbers: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def run_data(name: str, run: Run) -> dict[str, Any]:
    """A run called ``name``; seconds are nanoseconds in columns, and loops are their numbers, -1 outside of all."""
    simulation, batch = run.simulation, batch_of(run.program)
    words, number = Words(), {loop.name: place for place, loop in enumerate(simulation.loops)}
    by_name = {event.name: place for place, event in enumerate(simulation.timeline)}
    return {
        "name": name,
        "scheduled": simulation.is_scheduled,
        "measured": simulation.is_measured,
        "figures": _figures(run),
        "loops": [_loop(loop, number) for loop in simulation.loops],
        "events": [_event(event, number, words) for event in simulation.timeline],
        "waits": [
            [ns(wait.start_s), ns(wait.end_s), number.get(wait.loop, -1), by_name.get(wait.name, -1), wait.stream]
            for wait in simulation.waits
        ],
        "collectives": _collectives(simulation),
        "lines": line_seconds(run),
        "line_bytes": line_bytes(run),
        "memory": {
            "arguments": 0 if simulation.is_measured else simulation.memory.argument_bytes,
            "outputs": 0 if simulation.is_measured else simulation.memory.output_bytes,
            "live": [[ns(at_s), number.get(loop, -1), size] for at_s, loop, size in live_bytes(simulation)],
            "blocks": [_block(block, number, by_name, words) for block in blocks(simulation, batch, run.words)],
        },
        "words": list(words.numbers),
    }


def line_seconds(run: Run) -> dict[str, list[float]]:
    """What each of the user's lines takes of a step: seconds of kernels, and of waiting for what it sends or copies.

    All of them together are the step. What XLA leaves without a line has that of what is beside it, if that is known.
    """
    simulation, seconds = run.simulation, defaultdict[str, list[float]](lambda: [0.0, 0.0])
    origins = Origins.of(simulation.module, run.program)
    said = {event.name: origins.said(event.name, event.op_name, event.source) for event in simulation.timeline}
    sources = {name: line_text(line) or NO_LINE for name, (_, line) in said.items()}
    for event in simulation.timeline:
        if event.stream is Stream.COMPUTE:
            seconds[sources[event.name]][0] += event.trips * (event.end_s - event.start_s)
    for wait in simulation.waits:
        seconds[sources.get(wait.name, NO_LINE)][1] += wait.trips * (wait.end_s - wait.start_s)
    seconds[UNRECORDED if simulation.is_measured else REST][1] = simulation.step_s - sum(map(sum, seconds.values()))
    return {line: [round(each, 9) for each in both] for line, both in seconds.items()}


def line_bytes(run: Run) -> dict[str, int]:
    """What each of the user's lines made of what is in a device's memory where most of it is needed.

    All of them together are the peak; nothing is known of what is not compiled.
    """
    simulation = run.simulation
    if simulation.module is None:
        return {}
    sizes = defaultdict(int, {ARGUMENTS: simulation.memory.argument_bytes})
    for each in held_blocks(simulation, run.program, run.words):
        sizes[line_text(each.line) or NO_LINE] += each.bytes
    sizes[GAPS] = simulation.peak_bytes - sum(sizes.values())
    return dict(sizes)


def category(event: Event) -> str:
    """What the page colours an operation by: kernels by what ``explain`` counts them to."""
    return str(event.part) if event.stream is Stream.COMPUTE else event.stream + WITHIN * event.is_within_node


_NOT_MEASURED = ("bound_s", "sent_bytes", "peak_bytes", "host_bytes")


def _figures(of: Run) -> dict[str, float]:
    """By name; of a measured run those alone that a trace tells."""
    run, achieves = of.simulation, of.achieves
    figures = {
        "step_s": run.step_s,
        "bound_s": run.bound_s,
        "compute_s": run.compute_s,
        "communication_s": run.communication_s,
        "exposed_communication_s": run.exposed_communication_s,
        "copy_s": run.copy_s,
        "exposed_copy_s": run.exposed_copy_s,
        "sent_bytes": run.sent_bytes,
        "peak_bytes": run.peak_bytes,
        "host_bytes": run.memory.host_bytes,
    }
    if achieves is not None and run.step_s:
        figures |= {"mfu": achieves.mfu(run.step_s), "examples_per_s": achieves.examples / run.step_s}
        figures |= {"tokens_per_s": of.tokens / run.step_s}
    return {name: value for name, value in figures.items() if not (run.is_measured and name in _NOT_MEASURED)}


def _loop(loop: Loop, number: Mapping[str, int]) -> list[Any]:
    times = ns(loop.began_s), ns(loop.shown_s), ns(loop.trip_s)
    return [loop.name, number.get(loop.parent, -1), loop.trip_count, *times]


def _event(event: Event, number: Mapping[str, int], words: Words) -> list[Any]:
    said = words(event.name), words(event.op_name), words(line_text(users_line(event.source))), words(category(event))
    return [ns(event.start_s), ns(event.end_s), number.get(event.loop, -1), event.trips, event.sent_bytes, *said]


def _block(block: Block, number: Mapping[str, int], events: Mapping[str, int], words: Words) -> list[Any]:
    where = ns(block.begin_s), ns(block.end_s), number.get(block.loop, -1), block.address, block.bytes
    return [*where, events.get(block.made_by, -1), words(block.role)]


def _collectives(simulation: Simulation) -> list[list[Any]]:
    """Kind, launches, seconds, seconds exposed and bytes sent, of collectives and copies, most seconds first.

    No bytes of a measured run.
    """
    rows: dict[str, list[Any]] = {}
    kinds = {event.name: category(event) for event in simulation.timeline if event.stream is not Stream.COMPUTE}
    for event in simulation.timeline:
        if kind := kinds.get(event.name):
            row = rows.setdefault(kind, [kind, 0, 0.0, 0.0, 0])
            row[1] += event.trips
            row[2] += event.trips * (event.end_s - event.start_s)
            row[4] += 0 if simulation.is_measured else event.trips * event.sent_bytes
    for wait in simulation.waits:
        kind = kinds.get(wait.name, wait.stream.value)
        rows.setdefault(kind, [kind, 0, 0.0, 0.0, 0])[3] += wait.trips * (wait.end_s - wait.start_s)
    return sorted(rows.values(), key=lambda row: -row[2])
