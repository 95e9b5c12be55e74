"""What stands beside an instruction of a module: the arguments that a collective is about, and who else has a name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from jax_deepcompile.costs.schedule import Schedule, schedule_of
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.reader import Instruction, Module, leaves

_FAR = 4
"""How many instructions away a name is still looked for."""


@dataclass(frozen=True)
class Neighbours:
    """Of the instructions of ``module``, whose arguments are called ``inputs[0]`` and so on."""

    module: Module

    @cached_property
    def _schedule(self) -> Schedule:
        return schedule_of(self.module)

    @cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {each.name: each for each in self._schedule.order}

    def moved(self, name: str, trained: Collection[int]) -> tuple[str, list[int]]:
        """What kind of collective an instruction is, and the arguments it gathers, or reduces gradients of.

        Args:
          name: of the instruction.
          trained: which arguments have gradients.
        """
        instruction = self._by_name.get(name)
        kind = "" if instruction is None else opcodes.split(instruction.opcode)[0]
        found: Iterable[int] = ()
        if instruction is not None and kind == "all-gather":
            found = self._gathered(instruction)
        elif instruction is not None and kind in ("all-reduce", "reduce-scatter"):
            found = self._updated(instruction, trained)
        return kind, list(dict.fromkeys(found))

    def near(self, name: str) -> list[tuple[str, str]]:
        """``op_name`` and line of what has them beside an instruction, the nearest it reads first."""
        around = self._around(self._by_name[name]) if name in self._by_name else ()
        found = (each for each in around if each.op_name and each.opcode != "parameter")
        return [(each.op_name, self.module.source(each)) for each in found]

    def _gathered(self, gather: Instruction) -> Iterator[int]:
        """The arguments that it gathers."""
        for operand in self._operands(gather):
            numbers = [number for each in self._from(operand) if (number := each.input_number) is not None]
            yield from numbers[:1]

    def _updated(self, reduction: Instruction, trained: Collection[int]) -> Iterator[int]:
        """The parameters that are read together with what it makes."""
        sizes = {math.prod(array.dims) for _, array in leaves(reduction.shape)} - {1}
        for reader in self._levels(reduction, self._users):
            for each in self._operands(reader):
                number = each.input_number
                if (
                    number is not None
                    and number in trained
                    and any(math.prod(array.dims) in sizes for _, array in leaves(each.shape))
                ):
                    yield number

    def _from(self, instruction: Instruction) -> Iterator[Instruction]:
        """``instruction``, and what it is made of, one after the other."""
        for _ in range(2 * _FAR):
            yield instruction
            operands = self._operands(instruction)
            if len(operands) != 1:
                return
            taken = instruction.opcode == "get-tuple-element" and operands[0].opcode == "tuple"
            instruction = self._operands(operands[0])[instruction.number] if taken else operands[0]

    def _around(self, instruction: Instruction) -> Iterator[Instruction]:
        """What it reads, and what that reads; then what reads it, and what reads that."""
        yield from self._levels(instruction, self._operands)
        yield from self._levels(instruction, self._users)

    def _levels(self, instruction: Instruction, neighbours: Callable) -> Iterator[Instruction]:
        level = [instruction]
        for _ in range(_FAR):
            level = list({other.name: other for each in level for other in neighbours(each)}.values())
            yield from level

    def _users(self, instruction: Instruction) -> Sequence[Instruction]:
        return self._schedule.home[instruction.name].users.get(instruction.name, ())

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        home = self._schedule.home[instruction.name]
        return [home.by_name[name] for name in instruction.operands if name in home.by_name]
