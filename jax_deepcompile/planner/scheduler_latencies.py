"""Latencies of every operation for XLA's scheduler, so that the schedule it makes keeps the network busy.

XLA puts as much compute beside a collective as its latency, going through a program from its end. Where a loop
has less compute than communication, what its last collectives get so is missing beside the others: the network then
waits for compute before it can go on. There each collective is given its share of the compute only.
"""

from __future__ import annotations

from collections.abc import Iterator

from jax_deepcompile.costs.simulation import Event, Simulation
from jax_deepcompile.costs.streams import Queue
from jax_deepcompile.hlo.types import Module
from jax_deepcompile.lowering.latencies import Latency


def scheduler_latencies(simulation: Simulation, at_a_time: int = 1, scale: float = 1.0) -> tuple[Latency, ...]:
    """One for each operation of the simulated program, by name.

    Args:
      simulation: of the program as XLA schedules it by its own estimates.
      at_a_time: collectives that may be in flight together, 1 or 2.
      scale: of the latencies of collectives; how well a schedule fits turns on little.
    """
    shares = {loop.name: loop.coverable for loop in simulation.loops if loop.is_innermost}

    def latency_s(event: Event) -> float:
        lasts_s = event.end_s - event.start_s
        if event.stream.queue is not Queue.NETWORK:
            return lasts_s
        return lasts_s * scale * (shares.get(event.loop, 1.0) if at_a_time == 1 else _SHARING)

    latencies = {} if simulation.module is None else dict.fromkeys(_conditions(simulation.module), 0.0)
    latencies |= {event.name: round(1e6 * latency_s(event), 3) for event in simulation.timeline}
    return tuple(Latency(name, microseconds) for name, microseconds in sorted(latencies.items()))


def _conditions(module: Module) -> Iterator[str]:
    """The kernels of loops' conditions, which take no time that counts; XLA warns of those that it is not told of."""
    for computation in module.computations.values():
        for loop in computation.instructions:
            if loop.opcode == "while":
                yield from (each.name for each in module.condition(loop).instructions if each.opcode == "fusion")


_SHARING = 1.9
"""How many times as long a collective takes beside another: they share the network. A little less than 2, lest their
ends come after the end of the loop that has just as much else to do."""
