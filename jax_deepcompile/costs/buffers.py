"""The buffers of a compiled program, and when each is needed.

Live ranges are those of XLA's ``HloLiveRange``: from the instruction that computes a value to its last use, where a
loop takes over what it carries before its first trip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax_deepcompile.costs.dataflow import Flow, Place
from jax_deepcompile.costs.schedule import Schedule
from jax_deepcompile.hlo.reader import Array, Index, Instruction, Module, leaves


@dataclass(frozen=True)
class Value:
    """An array that an instruction computes.

    Attributes:
      name: the instruction.
      index: where in its result.
      array: the array's type.
      begin: position in the schedule where it comes to be.
      end: position of its last use.
    """

    name: str
    index: Index
    array: Array
    begin: int
    end: int

    @property
    def place(self) -> Place:
        return self.name, self.index


def is_workspace(value: Value, schedule: Schedule) -> bool:
    """Whether that is scratch memory of a library, such as cuBLAS."""
    maker = schedule.order[schedule.position[value.name]]
    return maker.opcode == "custom-call" and value.index not in ((), (0,)) and value.array.dtype in ("s8", "u8")


@dataclass(frozen=True)
class Buffer:
    """Values with one address.

    Attributes:
      values: in the order in which they come to be.
      is_argument: whether an argument of the program lives there.
      is_output: whether a result of the program does.
      is_constant: whether it is part of the program.
    """

    values: tuple[Value, ...]
    is_argument: bool = False
    is_output: bool = False
    is_constant: bool = False

    @property
    def bytes(self) -> int:
        return max(value.array.bytes for value in self.values)

    @property
    def is_on_host(self) -> bool:
        return any(value.array.is_on_host for value in self.values)

    @property
    def is_temporary(self) -> bool:
        """Whether the program needs memory for it besides its arguments, results and constants."""
        return not (self.is_argument or self.is_output or self.is_constant)


def buffers_of(module: Module, schedule: Schedule) -> tuple[Buffer, ...]:
    """All buffers of a program."""
    flow, entry = Flow.of(module), module.entry
    ends = _ends(flow, schedule)
    grouped: dict[Place, list[Value]] = {}
    for place, array in flow.arrays.items():
        value = Value(*place, array, schedule.position[place[0]], ends[place])
        grouped.setdefault(flow.buffer(place), []).append(value)
    outputs = _homes(flow, entry.root)
    arguments = {home for parameter in entry.parameters for home in _homes(flow, parameter)}
    constants = {home for step in schedule.order if step.opcode == "constant" for home in _homes(flow, step)}
    return tuple(
        Buffer(
            values=tuple(sorted(values, key=lambda value: (value.begin, value.end))),
            is_argument=home in arguments,
            is_output=home in outputs,
            is_constant=home in constants,
        )
        for home, values in grouped.items()
    )


def _homes(flow: Flow, instruction: Instruction) -> set[Place]:
    """The buffers of what is in an instruction's result."""
    return {flow.buffer(flow.value_at[instruction.name, index]) for index, _ in leaves(instruction.shape)}


def _ends(flow: Flow, schedule: Schedule) -> Mapping[Place, int]:
    """The position of each value's last use or mention; of one that a computation returns, just after its end."""
    ends = {place: schedule.position[place[0]] for place in flow.arrays}
    for (name, index), value in flow.value_at.items():
        home = schedule.home[name]
        last = schedule.position[name]
        if name == home.root_name:
            last = schedule.spans[home.name][1] + 1
        for user in home.users.get(name, ()):
            last = max(last, _use(flow.module, schedule, user, index))
        ends[value] = max(ends[value], last)
    return ends


def _use(module: Module, schedule: Schedule, user: Instruction, index: Index) -> int:
    """When ``user`` needs what is at ``index`` of its operand: a loop before its first trip, a tuple never."""
    if user.opcode == "tuple" or (user.opcode == "get-tuple-element" and index):
        return -1
    if user.opcode == "while":
        return schedule.position[module.body(user).parameters[0].name]
    return schedule.position[user.name]
