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
from jax_deepcompile.costs.least import least_s
from jax_deepcompile.costs.memory import memory_of
from jax_deepcompile.costs.operation import timing_of
from jax_deepcompile.costs.player import Operation, Player
from jax_deepcompile.costs.simulation import Loop, Repeated, Simulation, Totals
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
    loops, events, memory = tuple(run.loops), tuple(run.events), memory_of(module)
    record = {"waits": tuple(run.waits), "played": tuple(run.played), "module": module}
    return Simulation(run.ended_s, run.totals, loops, events, memory, least_s(module.entry, schedule.busy_s), **record)


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
    """

    started: dict[str, _UnderWay] = field(default_factory=dict)
    carried: Mapping[int, _UnderWay] = field(default_factory=dict)

    @property
    def late_s(self) -> float:
        """How long the other queues are still busy once the compute stream is free."""
        return self.ended_s - self.now_s

    def end(self, operation: _UnderWay) -> None:
        """Holds the compute stream until it has ended."""
        self.wait({operation.timing.stream: operation.end_s}, operation.operation)


@dataclass
class _Schedule:
    """Plays computations of a module.

    Attributes:
      busy_s: how long each instruction of the program itself holds each queue at least, by name.
    """

    module: Module
    costs: CostModel
    busy_s: dict[str, dict[Queue, float]] = field(default_factory=dict)

    def play(self, computation: Computation, run: _Run) -> None:
        for instruction in computation.instructions:
            before, passed_on = run.totals, self._run(computation, instruction, run)
            if computation is self.module.entry and run.totals is not before:
                held = _held_s(run.totals)
                others = {name: {timing.stream.queue: timing.seconds} for name, timing in passed_on.items()}
                for each in (_held_s(before), *others.values()):
                    held |= {queue: held[queue] - seconds for queue, seconds in each.items()}
                self.busy_s |= {**others, instruction.name: held}

    def _run(self, computation: Computation, instruction: Instruction, run: _Run) -> dict[str, Timing]:
        """Plays one instruction; returns what it leaves under way for others, by the name of what reads it."""
        opcode, part = opcodes.split(instruction.opcode)
        if opcode not in opcodes.KNOWN:
            raise errors.UnknownOperationError(instruction.opcode, instruction.name)
        if part == "-done":
            self._wait(computation, instruction, run)
        elif part == "-update" or opcode in opcodes.FREE or instruction.target in opcodes.FREE_CALLS:
            return {}
        elif opcode == "while":
            return self._loop(computation, instruction, run)
        elif opcode == "conditional":
            self._branch(instruction, run)
        elif opcode == "call" and not part:
            self.play(self.module.body(instruction), run)
        else:
            self._issue(computation, instruction, part == "-start", run)
        return {}

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

    def _loop(self, computation: Computation, loop: Instruction, run: _Run) -> dict[str, Timing]:
        """Plays one trip; a second one if trips leave operations under way for the next, and further ones as long as
        they work off what was under way before the loop. What the last trip leaves is returned.
        """
        counted = trip_count(self.module, loop)
        trips, body = (1 if counted is None else counted), self.module.body(loop)
        if trips == 0:
            return {}

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
        delay_s = (alike - 1) * trip_s
        run.now_s, run.taken = steady.now_s + delay_s, steady.taken
        run.free = {
            queue: {stream: end_s + delay_s for stream, end_s in due.items()} for queue, due in steady.free.items()
        }
        users = [each for each in computation.readers(loop) if each.opcode == "get-tuple-element"]
        passed_on = {user.name: left[user.number] for user in users if user.number in left}
        run.started |= {name: replace(each, end_s=each.end_s + delay_s) for name, each in passed_on.items()}
        return {name: each.timing for name, each in passed_on.items()}

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


def _held_s(totals: Totals) -> dict[Queue, float]:
    """How long what was played holds each queue at least: compute for what the others cost it, too."""
    return {**totals.alone_s, Queue.COMPUTE: totals.alone_s.get(Queue.COMPUTE, 0.0) + totals.delayed_s}


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
