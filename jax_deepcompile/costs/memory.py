"""Device memory that a compiled program takes, and how much of it is needed when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_deepcompile.costs.buffers import Value, buffers_of, is_workspace
from jax_deepcompile.costs.dataflow import Place
from jax_deepcompile.costs.packing import Block, packed
from jax_deepcompile.costs.schedule import NESTING, Schedule, schedule_of
from jax_deepcompile.costs.sharing import overwrite
from jax_deepcompile.hlo.reader import Module

OF_LIBRARIES = "workspace of libraries"

_POINTER_BYTES = 8


@dataclass(frozen=True)
class Held:
    """Memory that temporaries take without pause, one after another.

    Attributes:
      bytes: how much.
      address: from the beginning of the memory for temporaries.
      begin, end: positions among ``MemoryUse.names`` from which and until when it is needed.
      places: the results that are in it, in order.
    """

    bytes: int
    address: int
    begin: int
    end: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class MemoryUse:
    """Device memory of one program. Host memory is counted apart.

    Attributes:
      argument_bytes: its arguments.
      output_bytes: its results, but for those that take the buffers of arguments.
      temporary_bytes: all else, with the gaps between buffers: what XLA calls ``temp_size_in_bytes``.
      host_bytes: buffers in the host's memory.
      names: the instructions in the order in which they run, those of a loop's body once.
      live_bytes: what is needed while each of them runs: arguments, results and temporaries, without gaps.
      peak_values: the temporaries needed where most are needed: pairs (bytes, instruction), largest first; for
        instruction ``OF_LIBRARIES`` where a library has it for itself.
      loops: for each of ``names`` the innermost while it is in; empty outside of loops. None of a program that is not
        compiled.
      held: where temporaries are and when; none of a program that is not compiled.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    host_bytes: int
    names: tuple[str, ...] = field(repr=False)
    live_bytes: tuple[int, ...] = field(repr=False)
    peak_values: tuple[tuple[int, str], ...] = field(repr=False)
    loops: tuple[str, ...] = field(default=(), repr=False)
    held: tuple[Held, ...] = field(default=(), repr=False)

    @property
    def peak_bytes(self) -> int:
        """What the program takes."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    @property
    def live_peak_bytes(self) -> int:
        """The most that is needed at one time; less than ``peak_bytes`` by the gaps between buffers."""
        return max(self.live_bytes, default=0)


def memory_of(module: Module) -> MemoryUse:
    """Reckons what XLA's buffer assignment gives ``module``."""
    schedule = schedule_of(module)
    buffers = buffers_of(module, schedule)
    device = [buffer for buffer in buffers if not buffer.is_on_host]
    arguments = sum(buffer.bytes for buffer in device if buffer.is_argument)
    outputs = sum(buffer.bytes for buffer in device if buffer.is_output and not buffer.is_argument)
    if isinstance(module.entry.root.shape, tuple):
        outputs += _POINTER_BYTES * len(module.entry.root.shape)
    groups = overwrite(module, schedule, [buffer for buffer in device if buffer.is_temporary])
    blocks = [block_of(group) for group in groups]
    live, packing = live_bytes_of(blocks, len(schedule.order)), packed(blocks)
    peak = int(np.argmax(live))
    needed = [value for group in groups for value in group if value.begin <= peak <= value.end]
    return MemoryUse(
        argument_bytes=arguments,
        output_bytes=outputs,
        temporary_bytes=packing.bytes,
        host_bytes=sum(buffer.bytes for buffer in buffers if buffer.is_on_host),
        names=tuple(instruction.name for instruction in schedule.order),
        live_bytes=tuple(int(size) + arguments + outputs for size in live),
        peak_values=tuple(sorted(((value.array.bytes, _whose(value, schedule)) for value in needed), reverse=True)),
        loops=_loops(module, schedule),
        held=tuple(
            Held(block.size_bytes, address, begin, end, _places(group, begin, end))
            for group, block, address in zip(groups, blocks, packing.addresses, strict=True)
            for begin, end in block.stretches()
        ),
    )


def _whose(value: Value, schedule: Schedule) -> str:
    return OF_LIBRARIES if is_workspace(value, schedule) else value.name


def _places(values: Sequence[Value], begin: int, end: int) -> tuple[Place, ...]:
    """The results among ``values`` that are needed within a stretch."""
    ordered = sorted(values, key=lambda value: value.begin)
    return tuple(value.place for value in ordered if begin <= value.begin <= end)


def _loops(module: Module, schedule: Schedule) -> tuple[str, ...]:
    """For each position of ``schedule`` the innermost while it is in."""
    loop_of = {module.entry.name: ""}
    for caller in reversed(schedule.order):  # what it runs comes before it
        if caller.opcode in NESTING:
            around = loop_of[schedule.home[caller.name].name]
            loop_of |= dict.fromkeys(caller.called, caller.name if caller.opcode == "while" else around)
    return tuple(loop_of[schedule.home[step.name].name] for step in schedule.order)


def block_of(values: Sequence[Value]) -> Block:
    """The memory of one buffer."""
    ordered = sorted(values, key=lambda value: value.begin)
    return Block(max(value.array.bytes for value in ordered), tuple((value.begin, value.end) for value in ordered))


def live_bytes_of(blocks: Sequence[Block], length: int) -> np.ndarray:
    """Bytes needed at each position of the schedule."""
    change = np.zeros(length + 2, np.int64)
    for block in blocks:
        for begin, end in block.stretches():
            change[begin] += block.size_bytes
            change[end + 1] -= block.size_bytes
    return np.cumsum(change)[: max(length, 1)]
