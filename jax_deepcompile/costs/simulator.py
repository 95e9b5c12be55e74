"""Plays the schedule of a compiled program, to tell how long a step takes and how much of its communication is exposed.

The compute stream runs operations in the order of the schedule; the others are those of ``player``. An asynchronous
operation begins when it is issued or when its queue is free, whichever is later; its ``done`` holds the compute stream
until it has ended. So does a synchronous one at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.memory import memory_of
from jax_deepcompile.costs.operation import timing_of
from jax_deepcompile.costs.player import Operation, Player
from jax_deepcompile.costs.simulation import Loop, Repeated, Simulation
from jax_deepcompile.costs.streams import Queue, Stream, Timing
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.reader import Computation, Instruction, Module
from jax_deepcompile.hlo.trip_counts import trip_count


def simulate(module: Module, costs: CostModel) -> Simulation:
    """Plays one step of ``module``.

    Raises:
      UnscheduledHloError: the module was not compiled.
      UnknownOperationError: it has an operation that nobody has said how to time.
    """
    if not module.is_scheduled:
        raise errors.UnscheduledHloError(module.name)
    schedule, run = _Schedule(module, costs), _Run()
    schedule.play(module.entry, run)
    alone_s = run.totals.compute_s - run.totals.slowed_s
    in_order_s = max((needed_s + alone_s - done_s for needed_s, done_s in schedule.loop_ends), default=0.0)
    loops, events, memory = tuple(run.loops), tuple(run.events), memory_of(module)
    record = {"waits": tuple(run.waits), "played": tuple(run.played), "module": module}
    return Simulation(run.ended_s, run.totals, loops, events, memory, in_order_s, **record)


@dataclass(frozen=True)
class _UnderWay:
    """An asynchronous operation that began, and when it ends."""

    timing: Timing
    end_s: float
    operation: Operation


@dataclass
class _Run(Player):
    """One run of one computation.

    Attributes:
      started: the asynchronous operations under way, by name.
      carried: those that the previous trip, or what came before the loop, has left under way, by place in its tuple.
      waited_s: what the collectives took that it waited for, hidden or not.
    """

    started: dict[str, _UnderWay] = field(default_factory=dict)
    carried: Mapping[int, _UnderWay] = field(default_factory=dict)
    waited_s: float = 0.0

    @property
    def late_s(self) -> float:
        """How long the other queues are still busy once the compute stream is free."""
        return self.ended_s - self.now_s

    def end(self, operation: _UnderWay) -> None:
        """Holds the compute stream until it has ended."""
        self.wait({operation.timing.stream: operation.end_s}, operation.operation)
        if operation.timing.stream.queue is Queue.NETWORK:
            self.waited_s += operation.timing.seconds


@dataclass
class _Schedule:
    """Plays computations of a module.

    Attributes:
      loop_ends: at the end of each of the program's own loops: seconds of the collectives that loops have waited for by
        then, and of all kernels by then, as fast as alone.
    """

    module: Module
    costs: CostModel
    loop_ends: list[tuple[float, float]] = field(default_factory=list)

    def play(self, computation: Computation, run: _Run) -> None:
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

    def _issue(self, computation: Computation, instruction: Instruction, is_start: bool, run: _Run) -> None:
        """Runs an operation, or sets an asynchronous one under way."""
        timing = timing_of(self.module, computation, instruction, self.costs)
        said = Operation(instruction.name, instruction.op_name, self.module.source(instruction))
        due = run.play(timing, run.now_s, {}, lambda: said)
        if timing.stream is Stream.COMPUTE:
            return
        under_way = _UnderWay(timing, due[timing.stream], said)
        if is_start and not timing.is_sync:
            run.started[instruction.name] = under_way
        else:
            run.end(under_way)

    def _wait(self, computation: Computation, done: Instruction, run: _Run) -> None:
        start = _origin(computation, computation.operand(done, 0))
        under_way = run.started.get(start.name)
        if under_way is None and start.opcode == "get-tuple-element":
            under_way = run.carried.get(start.number)
        if under_way is not None:
            run.end(under_way)

    def _loop(self, computation: Computation, loop: Instruction, run: _Run) -> None:
        """Plays one trip; a second one if trips leave operations under way for the next, and further ones as long as
        they work off what was under way before the loop.
        """
        counted = trip_count(self.module, loop)
        trips, body = (1 if counted is None else counted), self.module.body(loop)
        if trips == 0:
            return

        def trip(before: _Run, carried: Mapping[int, _UnderWay]) -> _Run:
            streams = before.now_s, dict(before.free), dict(before.taken)
            after = _Run(*streams, trips * run.trips, loop.name, carried=carried)
            self.play(body, after)
            return after

        unsteady = list[_Run]()
        before, steady = run, trip(run, self._under_way(computation, computation.operand(loop, 0), run))
        left = self._under_way(body, body.root, steady)
        while len(unsteady) < min(trips - 1, _UNSTEADY) and (
            (left and not unsteady) or before.late_s > steady.late_s + _ALIKE_S
        ):
            unsteady.append(steady)
            before, steady = steady, trip(steady, left)
            left = self._under_way(body, body.root, steady)
        trip_s, alike = steady.now_s - before.now_s, trips - len(unsteady)
        where = run.now_s, before.now_s, run.loop
        run.played += (each for earlier in unsteady for each in earlier.played)
        run.played.append(Repeated(alike, dict.fromkeys(Queue, trip_s), tuple(steady.played)))
        run.events += steady.events
        run.loops += steady.loops
        run.waits += steady.waits
        in_all = trip_s, steady.totals, run.trips, not steady.loops
        run.loops.append(Loop(loop.name, loop.op_name, trips, counted is not None, *in_all, *where))
        for each, times in (*((each, 1) for each in unsteady), (steady, alike)):
            run.totals = run.totals.plus(each.totals, times)
        waited_s = sum(each.waited_s for each in unsteady) + alike * steady.waited_s
        if not run.loop:
            needed_s = self.loop_ends[-1][0] if self.loop_ends else 0.0
            self.loop_ends.append((needed_s + waited_s, run.totals.compute_s - run.totals.slowed_s))
        else:
            run.waited_s += waited_s
        delay_s = (alike - 1) * trip_s
        run.now_s, run.taken = steady.now_s + delay_s, steady.taken
        run.free = {
            queue: {stream: end_s + delay_s for stream, end_s in due.items()} for queue, due in steady.free.items()
        }
        for user in computation.readers(loop):
            if user.opcode == "get-tuple-element" and user.number in left:
                run.started[user.name] = replace(left[user.number], end_s=left[user.number].end_s + delay_s)

    def _under_way(self, computation: Computation, carry: Instruction, run: _Run) -> dict[int, _UnderWay]:
        """The operations under way that a loop's tuple holds, by place in it."""
        if carry.opcode != "tuple":
            return {}
        origins = [_origin(computation, computation.by_name[name]).name for name in carry.operands]
        return {place: run.started[name] for place, name in enumerate(origins) if name in run.started}

    def _branch(self, conditional: Instruction, run: _Run) -> None:
        """The branch that takes longest."""

        def play(name: str, branch: _Run) -> None:
            branch.started = dict(branch.started)
            self.play(self.module.computations[name], branch)

        run.longest([partial(play, name) for name in conditional.called], lambda branch, _: branch.now_s)


_UNSTEADY = 8
"""Trips of a loop that are played before one that counts for all others."""

_ALIKE_S = 1e-6
"""By how much less is under way after a trip that works off some of it."""


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
