"""What stands beside an instruction of a module: the arguments that a collective is about, and who else has a name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from jax_deepcompile.costs.schedule import Schedule, schedule_of
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo.reader import Computation, Instruction, Module, leaves

_CHAIN = 8
"""How many instructions, one after the other, an argument is followed through."""


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
        if name not in self._by_name:
            return []
        instruction = self._by_name[name]
        home = self._home(instruction)
        around = chain(home.feeding(instruction), home.fed(instruction))
        found = (each for each in around if each.op_name and each.opcode != "parameter")
        return [(each.op_name, self.module.source(each)) for each in found]

    def _gathered(self, gather: Instruction) -> Iterator[int]:
        """The arguments that it gathers."""
        for operand in self._home(gather).operands(gather):
            numbers = [number for each in self._from(operand) if (number := each.input_number) is not None]
            yield from numbers[:1]

    def _updated(self, reduction: Instruction, trained: Collection[int]) -> Iterator[int]:
        """The parameters that are read together with what it makes."""
        sizes = {math.prod(array.dims) for _, array in leaves(reduction.shape)} - {1}
        home = self._home(reduction)
        for reader in home.fed(reduction):
            for each in home.operands(reader):
                number = each.input_number
                if (
                    number is not None
                    and number in trained
                    and any(math.prod(array.dims) in sizes for _, array in leaves(each.shape))
                ):
                    yield number

    def _from(self, instruction: Instruction) -> Iterator[Instruction]:
        """``instruction``, and what it is made of, one after the other."""
        home = self._home(instruction)
        for _ in range(_CHAIN):
            yield instruction
            operands = home.operands(instruction)
            if len(operands) != 1:
                return
            taken = instruction.opcode == "get-tuple-element" and operands[0].opcode == "tuple"
            instruction = home.operands(operands[0])[instruction.number] if taken else operands[0]

    def _home(self, instruction: Instruction) -> Computation:
        return self._schedule.home[instruction.name]
