"""Device memory that a compiled program takes, and how much of it is needed when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_deepcompile.costs.buffers import Value, buffers_of
from jax_deepcompile.costs.packing import Block, packed_bytes
from jax_deepcompile.costs.schedule import schedule_of
from jax_deepcompile.costs.sharing import overwrite
from jax_deepcompile.hlo.reader import Module

_POINTER_BYTES = 8


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
      peak_values: the temporaries needed where most are needed: pairs (bytes, instruction), largest first.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    host_bytes: int
    names: tuple[str, ...] = field(repr=False)
    live_bytes: tuple[int, ...] = field(repr=False)
    peak_values: tuple[tuple[int, str], ...] = field(repr=False)

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
    live = live_bytes_of(blocks, len(schedule.order))
    peak = int(np.argmax(live))
    needed = [value for group in groups for value in group if value.begin <= peak <= value.end]
    return MemoryUse(
        argument_bytes=arguments,
        output_bytes=outputs,
        temporary_bytes=packed_bytes(blocks),
        host_bytes=sum(buffer.bytes for buffer in buffers if buffer.is_on_host),
        names=tuple(instruction.name for instruction in schedule.order),
        live_bytes=tuple(int(size) + arguments + outputs for size in live),
        peak_values=tuple(sorted(((value.array.bytes, value.name) for value in needed), reverse=True)),
    )


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
