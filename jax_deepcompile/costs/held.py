"""What a compiled program's temporaries are, as far as its instructions show.

Nothing is guessed from names: a gradient is what a reduction between devices reads or makes, what is kept for the
backward pass is made before and read after it begins, of examples is what depends on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from jax_deepcompile.costs.buffers import Buffer, buffers_of, is_workspace
from jax_deepcompile.costs.dataflow import Flow, Place
from jax_deepcompile.costs.memory import OF_LIBRARIES, Held, MemoryUse
from jax_deepcompile.costs.schedule import Schedule, schedule_of
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.reader import Instruction, Module, leaves


class Holds(StrEnum):
    """What a temporary is."""

    GRADIENT = "gradients"
    KEPT = "kept for the backward pass"
    WORKING = "being computed"
    GATHERED = "gathered from other devices"
    WORKSPACE = OF_LIBRARIES
    OTHER = "other"


@dataclass(frozen=True)
class Content:
    """What lies in a block of memory for some time.

    Attributes:
      bytes: of the block.
      address: from the beginning of the memory for temporaries.
      begin, end: positions among ``MemoryUse.names`` from which and until when it lies there.
      holds: what it is.
      name: the instruction that makes what is in it.
      op_name: the path of modules and primitives that it came from.
      source: the user's ``file:line``; empty if unknown.
      dims: of the array.
    """

    bytes: int
    address: int
    begin: int
    end: int
    holds: Holds
    name: str
    op_name: str
    source: str
    dims: tuple[int, ...]


def held_at_peak(module: Module, memory: MemoryUse, batch: Collection[int]) -> tuple[Content, ...]:
    """The temporaries in the device's memory where most is needed, largest first; see ``contents``."""
    peak = memory.live_bytes.index(max(memory.live_bytes))
    needed = [each for each in memory.held if each.begin <= peak <= each.end]
    return tuple(sorted(contents(module, needed, batch, peak), key=lambda each: -each.bytes))


def contents(module: Module, held: Iterable[Held], batch: Collection[int], at: int | None = None) -> Iterator[Content]:
    """What lies in memory, one after another in each block.

    Args:
      module: scheduled.
      held: its temporaries, or some of them.
      batch: which of its arguments hold examples: their places, or the numbers of those called ``inputs[0]`` and so on.
      at: the position at which to look; by default all.
    """
    blocks = _Blocks(module, schedule_of(module), Flow.of(module), frozenset(batch))
    for each in held:
        for begin, end, number in blocks.stretches(each):
            if at is None or begin <= at <= end:
                yield blocks.content(each, begin, end, number)


_FORWARDED = opcodes.FREE | opcodes.CONTROL
"""They pass values on."""

_MOVES = frozenset({"bitcast", "broadcast", "constant", "convert", "copy", "dynamic-slice"}) | frozenset(
    {"dynamic-update-slice", "parameter", "reshape", "slice", "transpose", "tuple"}
)
_ADDS = _MOVES | {"add"}
_REDUCTIONS = ("reduce-scatter", "all-reduce")
_PASSED_ON = ("copy", "parameter", "while")


@dataclass
class _Blocks:
    """The buffers of a module, by number, and what instructions tell of them."""

    module: Module
    schedule: Schedule
    flow: Flow
    batch: frozenset[int]

    @cached_property
    def buffers(self) -> list[Buffer]:
        found = buffers_of(self.module, self.schedule)
        return [each for each in found if each.is_temporary and not each.is_on_host]

    @cached_property
    def block_at(self) -> Mapping[Place, int]:
        return {value.place: number for number, each in enumerate(self.buffers) for value in each.values}

    @cached_property
    def ends(self) -> Mapping[Place, int]:
        return {value.place: value.end for each in self.buffers for value in each.values}

    def stretches(self, held: Held) -> Iterator[tuple[int, int, int]]:
        """From when until when which buffer lies in a block."""
        begin = held.begin
        for place in held.places:
            end = min(self.ends[place], held.end)
            if end >= begin:
                yield begin, end, self.block_at[place]
                begin = end + 1

    @cached_property
    def backward_from(self) -> int:
        """The position from which the backward pass runs; after all if there is none that can be told."""
        return next(
            (
                position
                for position, each in enumerate(self.schedule.order)
                if "transpose(" in each.op_name and opcodes.split(each.opcode)[0] in ("custom-call", "fusion", "dot")
            ),
            len(self.schedule.order),
        )

    def read_by(self, instruction: Instruction) -> list[Place]:
        """The values that an instruction reads."""
        home = self.schedule.home[instruction.name]
        return [
            self.flow.value_at[name, index]
            for name in instruction.operands
            for index, _ in leaves(home.by_name[name].shape)
            if (name, index) in self.flow.value_at
        ]

    def made_by(self, instruction: Instruction) -> list[Place]:
        places = [(instruction.name, index) for index, _ in leaves(instruction.shape)]
        return [place for place in places if place in self.flow.arrays]

    @cached_property
    def works(self) -> list[Instruction]:
        """All that makes values of its own, in order."""
        skipped = ("-done", "-update")
        return [
            each
            for each in self.schedule.order
            if each.opcode not in _FORWARDED and not each.opcode.endswith(skipped) and each.target != "AllocateBuffer"
        ]

    @cached_property
    def readers(self) -> Mapping[int, list[Instruction]]:
        return self._by_block(self.read_by)

    @cached_property
    def writers(self) -> Mapping[int, list[Instruction]]:
        return self._by_block(self.made_by)

    def _by_block(self, places_of: Callable[[Instruction], list[Place]]) -> dict[int, list[Instruction]]:
        found: dict[int, list[Instruction]] = {}
        for each in self.works:
            for number in self._blocks(places_of(each)):
                found.setdefault(number, []).append(each)
        return found

    def _blocks(self, places: Iterable[Place]) -> set[int]:
        return {self.block_at[place] for place in places if place in self.block_at}

    @cached_property
    def of_examples(self) -> frozenset[int]:
        """The blocks whose values depend on the batch."""
        arguments = enumerate(self.module.entry.parameters)
        numbered = ((each, place if each.input_number is None else each.input_number) for place, each in arguments)
        given = {(each.name, ()) for each, number in numbered if number in self.batch}
        found: set[int] = set()
        while True:
            before = len(found)
            for each in self.works:
                read = self.read_by(each)
                if any(place in given or self.block_at.get(place) in found for place in read):
                    found |= self._blocks(self.made_by(each))
            if len(found) == before:
                return frozenset(found)

    def content(self, held: Held, begin: int, end: int, number: int) -> Content:
        maker, holds = self._maker(number), self.holds(number)
        dims = self.buffers[number].values[0].array.dims
        made = maker.name, maker.op_name, self.module.source(maker)
        return Content(held.bytes, held.address, begin, end, holds, *made, dims)

    def holds(self, number: int) -> Holds:
        if any(is_workspace(value, self.schedule) for value in self.buffers[number].values):
            return Holds.WORKSPACE
        if self._comes_of(number, ("all-gather",), _MOVES):
            return Holds.GATHERED
        if self._is_gradient(number):
            return Holds.GRADIENT
        if number not in self.of_examples:
            return Holds.OTHER
        begin = self.buffers[number].values[0].begin
        last = max((self.schedule.position[each.name] for each in self.readers.get(number, ())), default=begin)
        return Holds.KEPT if begin < self.backward_from <= last else Holds.WORKING

    def _is_gradient(self, number: int) -> bool:
        writers = self.writers.get(number, ())
        if any(self.schedule.position[each.name] < self.backward_from for each in writers):
            return False
        return self._comes_of(number, _REDUCTIONS, _ADDS) or self._goes_to_reduction(number)

    def _comes_of(self, number: int, kinds: Sequence[str], through: frozenset[str]) -> bool:
        """Whether collectives of these ``kinds`` made what is in a block, or kernels that only do ``through``."""
        waiting, seen = [number], {number}
        while waiting:
            for writer in self.writers.get(waiting.pop(), ()):
                if opcodes.split(writer.opcode)[0] in kinds:
                    return True
                if self._does(writer) <= through:
                    read = self._blocks(self.read_by(writer))
                    waiting += read - seen
                    seen |= read
        return False

    def _goes_to_reduction(self, number: int) -> bool:
        waiting, seen = [number], {number}
        while waiting:
            for reader in self.readers.get(waiting.pop(), ()):
                if opcodes.split(reader.opcode)[0] in _REDUCTIONS:
                    return True
                if self._does(reader) <= _MOVES:
                    made = self._blocks(self.made_by(reader))
                    waiting += made - seen
                    seen |= made
        return False

    def _does(self, instruction: Instruction) -> set[str]:
        """The opcodes of a kernel, but for arithmetic with single numbers, as positions are."""
        opcode, _ = opcodes.split(instruction.opcode)
        if opcode != "fusion":
            return {opcode}
        steps = self.module.body(instruction).instructions
        return {each.opcode for each in steps if any(array.dims for _, array in leaves(each.shape))}

    def _maker(self, number: int, around: frozenset[int] = frozenset()) -> Instruction:
        """What made the most of a block, in a loop if any is; of a stack what makes each part, of a copy the original.

        Args:
          around: the blocks whose parts are looked for.
        """
        order, position, around = self.schedule.order, self.schedule.position, around | {number}
        writers = self.writers.get(number) or [order[position[self.buffers[number].values[0].name]]]
        in_loops = [each for each in writers if self.schedule.home[each.name] is not self.module.entry]
        maker = max(in_loops or writers, key=lambda each: bool(each.op_name))
        if not self._does(maker) & {"copy", "dynamic-update-slice"}:
            return maker
        made_of = [place for place in self.read_by(maker) if self.block_at.get(place) not in around]
        largest = max(made_of, key=lambda place: self.flow.arrays[place].bytes, default=None)
        part = order[position[largest[0]]] if largest else maker
        if largest and largest in self.block_at and part.opcode in _PASSED_ON:
            part = self._maker(self.block_at[largest], around)
        return part if part.op_name and part.opcode not in _PASSED_ON else maker
