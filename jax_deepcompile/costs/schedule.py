"""The one order in which a whole program runs: bodies of loops, branches and calls in place of what calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax_deepcompile.hlo.reader import Computation, Instruction, Module

NESTING = ("while", "conditional", "call")
"""Operations that run computations whose values have buffers of their own; those of a fusion stay in registers."""


@dataclass(frozen=True)
class Schedule:
    """Instructions of the entry and of all computations nested in it.

    Attributes:
      order: every instruction once; what a loop, branch or call runs comes just before it.
      position: where each instruction is in ``order``, by name.
      spans: the first and the last position of each computation, by name.
      home: the computation that each instruction is in, by the instruction's name.
    """

    order: tuple[Instruction, ...]
    position: Mapping[str, int]
    spans: Mapping[str, tuple[int, int]]
    home: Mapping[str, Computation]


def schedule_of(module: Module) -> Schedule:
    """Flattens ``module`` as XLA's buffer assignment does (``HloLiveRange::FlattenSchedule``)."""
    order: list[Instruction] = []
    spans: dict[str, tuple[int, int]] = {}
    home: dict[str, Computation] = {}

    def flatten(computation: Computation) -> None:
        begin = len(order)
        for instruction in computation.instructions:
            if instruction.opcode in NESTING:
                for name in instruction.called:
                    if name not in spans:
                        flatten(module.computations[name])
            order.append(instruction)
            home[instruction.name] = computation
        spans[computation.name] = (begin, len(order) - 1)

    flatten(module.entry)
    position = {instruction.name: at for at, instruction in enumerate(order)}
    return Schedule(tuple(order), position, spans, home)
