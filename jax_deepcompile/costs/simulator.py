"""Plays a scheduled program on streams, to tell how long a step takes and how much of its communication is exposed.

The compute stream runs operations in the order of the schedule. Collectives of each kind, and copies in each direction
between device and host, have a stream of their own; streams that share a queue, as all collectives but permutations do,
wait for each other. An asynchronous operation begins when it is issued or when its queue is free, whichever is later;
its ``done`` holds the compute stream until it has ended, and that wait is exposed. So is all of a synchronous one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.memory import memory_of
from jax_deepcompile.costs.operation import timing_of
from jax_deepcompile.costs.streams import Queue, Stream, Timing
from jax_deepcompile.costs.simulation import Event, Loop, Simulation, Totals
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.reader import Computation, Instruction, Module
from jax_deepcompile.hlo.trip_counts import trip_count

__all__ = ["Event", "Loop", "Simulation", "Totals", "simulate"]


def simulate(module: Module, costs: CostModel) -> Simulation:
    """Plays one step of ``module``.

    Raises:
      UnscheduledHloError: the module was not compiled.
      UnknownOperationError: it has an operation that nobody has said how to time.
    """
    if not module.is_scheduled:
        raise errors.UnscheduledHloError(module.name)
    player = _Player(module, costs)
    run = player.play(module.entry, _Run())
    in_order_s = max((needed_s + run.totals.compute_s - done_s for needed_s, done_s in player.loop_ends), default=0.0)
    return Simulation(run.ended_s, run.totals, tuple(player.loops), tuple(player.events), memory_of(module), in_order_s)


@dataclass
class _Run:
    """Where the streams are in one run of one computation.

    Attributes:
      now_s: when the compute stream is free.
      free_s: when the other queues are.
      started: when each asynchronous operation under way ends.
      carried: the same for those that a loop's previous trip, or what came before the loop, has left under way.
      waited_s: what the collectives took that it waited for, hidden or not.
      loop: whose body it is; empty for the program itself.
    """

    now_s: float = 0.0
    free_s: dict[Queue, float] = field(default_factory=dict)
    started: dict[str, tuple[Timing, float]] = field(default_factory=dict)
    carried: dict[int, tuple[Timing, float]] = field(default_factory=dict)
    trips: int = 1
    totals: Totals = field(default_factory=Totals)
    waited_s: float = 0.0
    loop: str = ""

    @property
    def ended_s(self) -> float:
        return max([self.now_s, *self.free_s.values()])


@dataclass
class _Player:
    """Plays computations.

    Attributes:
      events, loops: what has been played.
      loop_ends: at the end of each of the program's own loops: seconds of the collectives that loops have waited for by
        then, and of all compute by then.
    """

    module: Module
    costs: CostModel
    events: list[Event] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    loop_ends: list[tuple[float, float]] = field(default_factory=list)

    def play(self, computation: Computation, run: _Run) -> _Run:
        for instruction in computation.instructions:
            opcode, part = opcodes.split(instruction.opcode)
            if opcode not in opcodes.KNOWN:
                raise errors.UnknownOperationError(instruction.opcode, instruction.name)
            if part == "-done":
                self._wait(computation, instruction, run)
            elif part == "-update" or opcode in opcodes.FREE or instruction.target in opcodes.FREE_CALLS:
                continue
            elif opcode == "while":
                self._loop(computation, instruction, run)
            elif opcode == "conditional":
                self._branch(instruction, run)
            elif opcode == "call" and not part:
                self.play(self.module.body(instruction), run)
            else:
                self._issue(computation, instruction, part == "-start", run)
        return run

    def _issue(self, computation: Computation, instruction: Instruction, is_start: bool, run: _Run) -> None:
        """Runs an operation, or sets an asynchronous one under way."""
        timing = timing_of(self.module, computation, instruction, self.costs)
        begin_s = max(run.now_s, run.free_s.get(timing.stream.queue, 0.0))
        end_s = begin_s + timing.seconds
        run.totals = run.totals.plus(Totals.of(timing))
        self._record(instruction, timing, begin_s, run)
        if timing.stream is Stream.COMPUTE:
            run.now_s = end_s
        else:
            run.free_s[timing.stream.queue] = end_s
            if is_start and not timing.is_sync:
                run.started[instruction.name] = timing, end_s
            else:
                self._end(timing, end_s, run)

    def _end(self, timing: Timing, end_s: float, run: _Run) -> None:
        """Holds the compute stream until ``end_s``."""
        run.totals = run.totals.plus(Totals.of_wait(timing.stream, max(0.0, end_s - run.now_s)))
        run.now_s = max(run.now_s, end_s)
        if timing.stream.queue is Queue.NETWORK:
            run.waited_s += timing.seconds

    def _wait(self, computation: Computation, done: Instruction, run: _Run) -> None:
        start = _origin(computation, computation.operand(done, 0))
        under_way = run.started.get(start.name)
        if under_way is None and start.opcode == "get-tuple-element":
            under_way = run.carried.get(start.number)
        if under_way is not None:
            self._end(*under_way, run)

    def _loop(self, computation: Computation, loop: Instruction, run: _Run) -> None:
        """Plays one trip, and a second one if trips leave operations under way for the next."""
        counted = trip_count(self.module, loop)
        trips, body = (1 if counted is None else counted), self.module.body(loop)
        if trips == 0:
            return
        events, loops = len(self.events), len(self.loops)
        carried = self._under_way(computation, computation.operand(loop, 0), run)
        runs = trips * run.trips
        first = steady = self.play(body, _Run(run.now_s, dict(run.free_s), {}, carried, runs, loop=loop.name))
        began_s, left = run.now_s, self._under_way(body, body.root, first)
        if left and trips > 1:
            del self.events[events:], self.loops[loops:]
            began_s = first.now_s
            steady = self.play(body, _Run(began_s, dict(first.free_s), {}, left, runs, loop=loop.name))
            left = self._under_way(body, body.root, steady)
        trip_s = steady.now_s - began_s
        innermost = len(self.loops) == loops
        self.loops.append(
            Loop(loop.name, loop.op_name, trips, counted is not None, trip_s, steady.totals, run.trips, innermost)
        )
        run.totals = run.totals.plus(first.totals).plus(steady.totals, trips - 1)
        waited_s = first.waited_s + (trips - 1) * steady.waited_s
        if not run.loop:
            needed_s = self.loop_ends[-1][0] if self.loop_ends else 0.0
            self.loop_ends.append((needed_s + waited_s, run.totals.compute_s))
        else:
            run.waited_s += waited_s
        run.now_s = first.now_s + (trips - 1) * trip_s
        delay_s = run.now_s - steady.now_s
        run.free_s = {queue: end_s + delay_s for queue, end_s in steady.free_s.items()}
        for user in computation.users.get(loop.name, ()):
            if user.opcode == "get-tuple-element" and user.number in left:
                timing, end_s = left[user.number]
                run.started[user.name] = timing, end_s + delay_s

    def _under_way(self, computation: Computation, carry: Instruction, run: _Run) -> dict[int, tuple[Timing, float]]:
        """The operations under way that a loop's tuple holds, by place in it."""
        if carry.opcode != "tuple":
            return {}
        origins = [_origin(computation, computation.by_name[name]).name for name in carry.operands]
        return {place: run.started[name] for place, name in enumerate(origins) if name in run.started}

    def _branch(self, conditional: Instruction, run: _Run) -> None:
        """The branch that takes longest."""
        dearest, seen = None, len(self.events)
        for name in conditional.called:
            recorded = self.events[seen:]
            del self.events[seen:]
            branch = self.play(
                self.module.computations[name], replace(run, free_s=dict(run.free_s), started=dict(run.started))
            )
            if dearest is not None and branch.now_s <= dearest.now_s:
                self.events[seen:] = recorded
            else:
                dearest = branch
        if dearest is not None:
            run.now_s, run.free_s, run.totals = dearest.now_s, dearest.free_s, dearest.totals

    def _record(self, instruction: Instruction, timing: Timing, begin_s: float, run: _Run) -> None:
        self.events.append(
            Event(
                timing.stream,
                instruction.name,
                begin_s,
                begin_s + timing.seconds,
                run.trips,
                instruction.op_name,
                self.module.source(instruction),
                timing.kind,
                timing.sent_bytes,
                run.loop,
            )
        )


def _origin(computation: Computation, instruction: Instruction) -> Instruction:
    """What ``instruction`` names: through tuples taken apart again, and updates of asynchronous operations."""
    while True:
        source = computation.operand(instruction, 0) if instruction.operands else instruction
        if instruction.opcode == "get-tuple-element" and source.opcode == "tuple":
            instruction = computation.operand(source, instruction.number)
        elif instruction.opcode.endswith("-update") or instruction.opcode in ("opt-barrier", "bitcast"):
            instruction = source
        else:
            return instruction
