"""Plays a scheduled program on streams, to tell how long a step takes and how much of its communication is exposed.

The compute stream runs operations in the order of the schedule. Collectives run on one network stream (NCCL runs those
of one communicator one after another) and permutations on another; copies between device and host have a stream for
each direction. An asynchronous operation begins when it is issued or when its stream is free, whichever is later; its
``done`` holds the compute stream until it has ended, and that wait is exposed. So is all of a synchronous one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.operation import Stream, Timing, timing_of
from jax_deepcompile.lowering import opcodes
from jax_deepcompile.lowering.hlo import Computation, Instruction, Module


@dataclass(frozen=True)
class Totals:
    """Sums over a program or a part of it.

    Attributes:
      compute_s: on the compute stream, without waiting.
      communication_s: of collectives, hidden or not.
      exposed_communication_s: of that, what the compute stream waited for.
      copy_s: of copies between device and host, hidden or not.
      exposed_copy_s: of that, what the compute stream waited for.
      gathered_bytes: whole results of all-gathers.
      reduced_bytes: whole operands of reduce-scatters and all-reduces.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_communication_s: float = 0.0
    copy_s: float = 0.0
    exposed_copy_s: float = 0.0
    gathered_bytes: int = 0
    reduced_bytes: int = 0

    def plus(self, other: Totals, times: int = 1) -> Totals:
        """The sum of this and ``times`` the other."""
        return Totals(**{name: mine + times * getattr(other, name) for name, mine in vars(self).items()})


@dataclass(frozen=True)
class Event:
    """One operation on one stream.

    Attributes:
      stream: where it ran.
      name: of the instruction.
      start_s: from the beginning of the step; in a loop, in the first trip.
      end_s: likewise.
      trips: how often it runs in a step.
      op_name: the path of modules and primitives it came from.
      source: the user's ``file:line``.
    """

    stream: Stream
    name: str
    start_s: float
    end_s: float
    trips: int = 1
    op_name: str = ""
    source: str = ""


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
    """

    name: str
    op_name: str
    trip_count: int
    is_counted: bool
    trip_s: float
    trip: Totals


@dataclass(frozen=True)
class Simulation:
    """What a step costs.

    Attributes:
      step_s: from its first operation to its last.
      totals: sums over the step.
      loops: each while, inner ones before the one they are in.
      timeline: what ran when, in the order of issue; bodies of loops once.
    """

    step_s: float
    totals: Totals
    loops: tuple[Loop, ...]
    timeline: tuple[Event, ...]

    @property
    def compute_s(self) -> float:
        return self.totals.compute_s

    @property
    def communication_s(self) -> float:
        return self.totals.communication_s

    @property
    def exposed_communication_s(self) -> float:
        return self.totals.exposed_communication_s

    @property
    def copy_s(self) -> float:
        return self.totals.copy_s

    @property
    def exposed_copy_s(self) -> float:
        return self.totals.exposed_copy_s

    @property
    def gathered_bytes(self) -> int:
        return self.totals.gathered_bytes

    @property
    def reduced_bytes(self) -> int:
        return self.totals.reduced_bytes

    @property
    def bound_s(self) -> float:
        """What no schedule of the same operations beats: the busiest stream alone."""
        return max(self.compute_s, self.communication_s)

    def __str__(self) -> str:
        return (
            f"step {self.step_s:.3f} s: compute {self.compute_s:.3f}, exposed communication "
            f"{self.exposed_communication_s:.3f} of {self.communication_s:.3f}, exposed copies "
            f"{self.exposed_copy_s:.3f} of {self.copy_s:.3f}; {self.gathered_bytes / 1e9:.1f} GB gathered, "
            f"{self.reduced_bytes / 1e9:.1f} GB reduced"
        )


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
    return Simulation(run.ended_s, run.totals, tuple(player.loops), tuple(player.events))


@dataclass
class _Run:
    """Where the streams are in one run of one computation.

    Attributes:
      now_s: when the compute stream is free.
      free_s: when the other streams are.
      started: when each asynchronous operation under way ends.
      carried: the same for those that a loop's previous trip, or what came before the loop, has left under way.
    """

    now_s: float = 0.0
    free_s: dict[Stream, float] = field(default_factory=dict)
    started: dict[str, tuple[Timing, float]] = field(default_factory=dict)
    carried: dict[int, tuple[Timing, float]] = field(default_factory=dict)
    trips: int = 1
    totals: Totals = field(default_factory=Totals)

    @property
    def ended_s(self) -> float:
        return max([self.now_s, *self.free_s.values()])


@dataclass
class _Player:
    module: Module
    costs: CostModel
    events: list[Event] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)

    def play(self, computation: Computation, run: _Run) -> _Run:
        for instruction in computation.instructions:
            opcode, part = opcodes.split(instruction.opcode)
            if opcode not in opcodes.KNOWN:
                raise errors.UnknownOperationError(instruction.opcode, instruction.name)
            if part == "-done":
                self._wait(computation, instruction, run)
            elif part == "-update" or opcode in opcodes.FREE:
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
        run.totals = run.totals.plus(_totals(timing))
        if timing.stream is Stream.COMPUTE or not is_start or timing.is_sync:
            if timing.stream is not Stream.COMPUTE:
                run.totals = run.totals.plus(_exposed(timing, timing.seconds))
            self._record(instruction, timing, run.now_s, run)
            run.now_s += timing.seconds
            return
        begin_s = max(run.now_s, run.free_s.get(timing.stream, 0.0))
        run.free_s[timing.stream] = begin_s + timing.seconds
        run.started[instruction.name] = timing, begin_s + timing.seconds
        self._record(instruction, timing, begin_s, run)

    def _wait(self, computation: Computation, done: Instruction, run: _Run) -> None:
        start = _origin(computation, computation.operand(done, 0))
        under_way = run.started.get(start.name)
        if under_way is None and start.opcode == "get-tuple-element":
            under_way = run.carried.get(start.number)
        if under_way is not None:
            timing, end_s = under_way
            run.totals = run.totals.plus(_exposed(timing, max(0.0, end_s - run.now_s)))
            run.now_s = max(run.now_s, end_s)

    def _loop(self, computation: Computation, loop: Instruction, run: _Run) -> None:
        """Plays one trip, and a second one if trips leave operations under way for the next."""
        counted = self.module.trip_count(loop)
        trips, body = (1 if counted is None else counted), self.module.body(loop)
        if trips == 0:
            return
        begin_s, events, loops = run.now_s, len(self.events), len(self.loops)
        carried = self._carried(computation, computation.operand(loop, 0), run)
        first = self.play(body, _Run(begin_s, dict(run.free_s), {}, carried, trips * run.trips))
        steady, steady_s = first, first.now_s - begin_s
        left = self._carried(body, body.root, first)
        total_s, totals = trips * steady_s, Totals().plus(first.totals, trips)
        if left and trips > 1:
            del self.events[events:], self.loops[loops:]
            steady = self.play(body, _Run(first.now_s, dict(first.free_s), {}, left, trips * run.trips))
            steady_s = steady.now_s - first.now_s
            total_s = (first.now_s - begin_s) + (trips - 1) * steady_s
            totals = first.totals.plus(steady.totals, trips - 1)
        self.loops.append(Loop(loop.name, loop.op_name, trips, counted is not None, steady_s, steady.totals))
        run.totals = run.totals.plus(totals)
        run.now_s = begin_s + total_s
        delay_s = run.now_s - steady.now_s
        run.free_s = {stream: end_s + delay_s for stream, end_s in steady.free_s.items()}
        left = {} if not left else self._carried(body, body.root, steady)
        for user in computation.users.get(loop.name, ()):
            if user.opcode == "get-tuple-element" and user.number in left:
                timing, end_s = left[user.number]
                run.started[user.name] = timing, end_s + delay_s

    def _carried(self, computation: Computation, carry: Instruction, run: _Run) -> dict[int, tuple[Timing, float]]:
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


def _totals(timing: Timing) -> Totals:
    if timing.stream is Stream.COMPUTE:
        return Totals(compute_s=timing.seconds)
    if timing.stream.is_copy:
        return Totals(copy_s=timing.seconds)
    gathered = timing.bytes if timing.kind == "all-gather" else 0
    reduced = timing.bytes if timing.kind in ("reduce-scatter", "all-reduce") else 0
    return Totals(communication_s=timing.seconds, gathered_bytes=gathered, reduced_bytes=reduced)


def _exposed(timing: Timing, waited_s: float) -> Totals:
    if timing.stream.is_copy:
        return Totals(exposed_copy_s=waited_s)
    return Totals(exposed_communication_s=waited_s)
