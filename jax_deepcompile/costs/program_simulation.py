"""Plays a local program on streams, before it is compiled.

The compute stream runs kernels in the order of the program; the others are those of ``player``. An operation on them
begins as soon as its operands are there and its queue has done what comes before it in the program, as a scheduler with
memory to spare would have it; the compute stream waits for it where a kernel first reads what comes out. An
``optimization_barrier`` delays the values that it guards: they are there when all that go through it are.

A loop waits for its constants and stacks, and each trip for what it stacks; what it carries may be under way from trip
to trip until a kernel reads it. XLA may do better: it moves the reductions of what a trip stacks into the next trip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import name_path, open_jaxpr, user_source
from jax_deepcompile.costs.combining import Thresholds
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.player import Due, Operation, Player, merged
from jax_deepcompile.costs.program_memory import memory_of_program
from jax_deepcompile.costs.program_time import combined_timings, timings_of
from jax_deepcompile.costs.simulation import Loop, Repeated, Simulation, Totals
from jax_deepcompile.costs.streams import Queue, Stream, Timing
from jax_deepcompile.ir.primitives import Scan, While
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import bodies
from jax_deepcompile.ir.trip_counts import known_counts, trips_of

_MOST_TRIPS = 8
"""Trips that are played of a loop that comes to no steady state before; those left are taken to be like the last."""


def simulate_program(program: Program, costs: CostModel, thresholds: Thresholds | None = None) -> Simulation:
    """Plays one step of a program.

    Args:
      program: in the local view.
      costs: what things take.
      thresholds: what XLA makes one collective of; its defaults if None.

    Returns:
      Seconds, timeline and bytes; names are those of primitives with their places in the jaxprs around them, such as
      ``scan.7/dot_general.3``.
    """
    jaxprs, run = _Jaxprs(program, costs, thresholds or Thresholds()), _Run()
    outputs = jaxprs.play(program.jaxpr, [{}] * len(program.inputs), run, "")
    run.wait(merged([*outputs, *run.free.values()]))
    loops, events, memory = tuple(run.loops), tuple(run.events), memory_of_program(program)
    record = {"waits": tuple(run.waits), "played": tuple(run.played)}
    return Simulation(run.now_s, run.totals, loops, events, memory, is_scheduled=False, **record)


@dataclass
class _Run(Player):
    """What is being played.

    Attributes:
      began_s: before which nothing of the current trip begins.
    """

    began_s: float = 0.0

    def ends_s(self, results: Sequence[Due]) -> float:
        """When the compute stream is free and ``results`` are there."""
        return max([self.now_s, *merged(results).values()])

    def late(self, carried: Sequence[Due]) -> list[dict[str, float]]:
        """By how much queues and carried values are behind the compute stream: equal states go on equally."""
        ends = [*carried, {queue: max(due.values()) for queue, due in sorted(self.free.items())}]
        return [{where: round(at - self.now_s, 12) for where, at in due.items() if at > self.now_s} for due in ends]


@dataclass
class _Jaxprs:
    """Plays jaxprs of a program."""

    program: Program
    costs: CostModel
    thresholds: Thresholds
    timings: dict[int, list[Timing | None]] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)

    def play(self, jaxpr: Any, operands: Sequence[Due], run: _Run, path: str) -> list[Due]:
        """Plays a jaxpr whose operands are due at ``operands``; returns when its results are."""
        flat = open_jaxpr(jaxpr)
        timings = self._timings(flat)
        due: dict = dict(zip(flat.invars, operands, strict=True))

        def read(atom) -> Due:
            return {} if isinstance(atom, jex.Literal) else due.get(atom, {})

        for place, (eqn, timing) in enumerate(zip(flat.eqns, timings, strict=True)):
            name, given = f"{path}{eqn.primitive.name}.{place}", [read(atom) for atom in eqn.invars]
            if timing is not None:
                results = [self._issue(eqn, timing, merged(given), run, name)] * len(eqn.outvars)
            elif eqn.primitive.name == "scan":
                results = self._scan(eqn, given, run, name)
            elif eqn.primitive.name == "while":
                results = self._while(eqn, trips_of(eqn, known_counts(jaxpr)), given, run, name)
            elif eqn.primitive.name == "cond":
                results = self._branch(eqn, given, run, name)
            else:
                results = self.play(bodies(eqn)[0], given, run, f"{name}/")
            due.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in flat.outvars]

    def _timings(self, flat: Any) -> list[Timing | None]:
        if id(flat) not in self.timings:
            mesh, costs = self.program.mesh, self.costs
            alone = timings_of(flat, mesh, costs)
            self.timings[id(flat)] = combined_timings(flat, alone, mesh, costs, self.thresholds)
        return self.timings[id(flat)]

    def _issue(self, eqn: Any, timing: Timing, operands: Due, run: _Run, name: str) -> Due:
        """Runs a kernel, or sets another operation under way; tells when what it makes is there."""
        if timing.stream is Stream.COMPUTE and not timing.seconds:
            return operands
        return run.play(timing, run.began_s, operands, lambda: self._operation(eqn, name))

    def _operation(self, eqn: Any, name: str) -> Operation:
        if name not in self.operations:
            self.operations[name] = Operation(name, name_path(eqn), user_source(eqn))
        return self.operations[name]

    def _scan(self, eqn: Any, operands: list[Due], run: _Run, name: str) -> list[Due]:
        scan = Scan(eqn)
        consts, carry, stacks = scan.split(operands)
        run.wait(merged([*consts, *stacks]))

        def trip(carry: Sequence[Due]) -> list[Due]:
            there: Due = {}
            given = [*[there] * len(consts), *carry, *[there] * len(stacks)]
            carry, made = scan.split_results(self.play(scan.closed, given, run, f"{name}/"))
            run.wait(merged(made))
            return carry

        loop = Loop(name, name_path(eqn), scan.length, True, 0.0, Totals())
        return [*self._repeat(loop, trip, carry, run), *({} for _ in scan.results.ys)]

    def _while(self, eqn: Any, trips: int | None, operands: list[Due], run: _Run, name: str) -> list[Due]:
        loop = While(eqn)
        tested, read, start = loop.split(operands)
        run.wait(merged([*tested, *read]))

        def trip(carry: Sequence[Due]) -> list[Due]:
            run.wait(merged(self.play(loop.closed_condition, [*({} for _ in tested), *carry], run, f"{name}/cond/")))
            return self.play(loop.closed_body, [*({} for _ in read), *carry], run, f"{name}/")

        played = Loop(name, name_path(eqn), 1 if trips is None else trips, trips is not None, 0.0, Totals())
        return list(self._repeat(played, trip, start, run))

    def _repeat(
        self, loop: Loop, trip: Callable[[Sequence[Due]], list[Due]], carried: Sequence[Due], run: _Run
    ) -> Sequence[Due]:
        """Plays trips until one leaves behind what it began with, and takes the others to be like it."""
        totals, outside = run.totals, (run.trips, run.began_s, run.is_recorded)
        played, trip_s, delays, around, last = 0, 0.0, {}, run.played, ()
        run.trips *= loop.trip_count
        while played < loop.trip_count:
            before, began_s, free = run.late(carried), run.now_s, dict(run.free)
            run.began_s, run.totals, run.played = began_s, Totals(), []
            around.extend(last)
            carried, last = trip(carried), tuple(run.played)
            totals, played = totals.plus(run.totals), played + 1
            trip_s, delays = run.now_s - began_s, _paces(free, run, began_s)
            if run.late(carried) == before or played == _MOST_TRIPS:
                break
            run.is_recorded = False
        left = loop.trip_count - played
        run.played = [*around, Repeated(1 + left, dict.fromkeys(Queue, trip_s) | delays, last)]
        run.now_s += left * trip_s
        run.free = {queue: _delayed(due, delays, left) for queue, due in run.free.items()}
        carried = [_delayed(due, delays, left) for due in carried]
        trip_totals, run.totals = run.totals, totals.plus(run.totals, left)
        run.trips, run.began_s, run.is_recorded = outside
        if run.is_recorded and loop.trip_count:
            run.loops.append(replace(loop, trip_s=trip_s, trip=trip_totals))
        return carried

    def _branch(self, eqn: Any, operands: list[Due], run: _Run, name: str) -> list[Due]:
        """The branch that takes longest."""
        run.wait(operands[0])

        def play(number: int, body: Any, branch: _Run) -> list[Due]:
            return self.play(body, operands[1:], branch, f"{name}/{number}/")

        return run.longest([partial(play, *each) for each in enumerate(bodies(eqn))], _Run.ends_s)


def _paces(free: Mapping[Queue, Due], run: _Run, began_s: float) -> dict[Queue, float]:
    """How far one trip has brought each queue: as far as the compute stream, but for those that fall behind."""
    ends = {queue: max([*due.values(), began_s]) for queue, due in free.items()}
    trip_s = run.now_s - began_s
    paces = {queue: max(trip_s, max(due.values()) - ends.get(queue, began_s)) for queue, due in run.free.items()}
    return {Queue.COMPUTE: trip_s} | paces


def _delayed(due: Due, paces: Mapping[Queue, float], trips: int) -> Due:
    """The same after so many trips more."""
    return {stream: end_s + trips * paces.get(stream.queue, 0.0) for stream, end_s in due.items()}
