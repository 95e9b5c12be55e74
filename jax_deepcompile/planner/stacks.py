"""Which stacks of layers are worth a collective outside of their loop: the small ones, and those kept in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr, scan_counts
from jax_deepcompile.analysis.dataflow import renamed, unguarded
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.stacks import sliced_gathers, stacked_reductions
from jax_deepcompile.costs.program_time import ranks_per_node
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.hand_over import HandOver, shared_gathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives, stack_collectives

SMALL_STACK_BYTES = 64 << 20
"""What all layers of a small parameter may take unsharded."""


def small_stacks(program: Program, environment: Environment) -> tuple[StackCollectives, ...]:
    """The collectives of layer loops that spend most of their time on latency, where all layers' together are small."""

    def small(kind: str, length: int, size: int) -> bool:
        names = list(program.mesh.names)
        ranks = ranks_per_node(names, program.mesh, environment.costs)
        one, nothing = (environment.costs.collective_s(kind, each, program.mesh.size, ranks) for each in (size, 1))
        return length * size <= SMALL_STACK_BYTES and nothing > one / 2

    chosen = []
    for loop in find_loops(program.jaxpr):
        gathers = tuple(
            index
            for index, (gather, *_) in enumerate(sliced_gathers(loop.eqn))
            if small("all-gather", loop.length, gather.size_bytes)
        )
        reductions = tuple(
            index
            for index, each in enumerate(stacked_reductions(loop.eqn))
            if small("reduce-scatter", loop.length, each.size_bytes)
        )
        if gathers or reductions:
            chosen.append(StackCollectives(loop.name, gathers, reductions))
    return tuple(chosen)


@dataclass(frozen=True)
class Stack:
    """What one or more loops in the same place gather of the same stack.

    Attributes:
      gathers: loop names, and positions among their gathers of slices.
      size_bytes: of all layers, gathered.
    """

    gathers: tuple[tuple[str, int], ...]
    size_bytes: int


def repeated_stacks(program: Program, taken: Iterable[StackCollectives]) -> list[Stack]:
    """The stacks that layer loops inside of another loop gather again every time; without those ``taken`` already."""
    already = {(choice.loop, index) for choice in taken for index in choice.gathers}
    found: dict[Any, list[tuple[str, int]]] = {}
    sizes = {}
    loops = list(find_loops(program.jaxpr))
    sources = {loop.path: unguarded(open_jaxpr(loop.eqn.params["jaxpr"])) for loop in loops}
    for loop in loops:
        if len(loop.path) < 2:
            continue
        stacks = dict(zip(loop.slices, loop.eqn.invars[sum(scan_counts(loop.eqn)) :], strict=True))
        for index, (gather, *_) in enumerate(sliced_gathers(loop.eqn)):
            if (loop.name, index) in already:
                continue
            stack = renamed(stacks[gather.source], sources[loop.path[:-1]])
            where = (loop.path[:-1], stack, gather.key[1:])
            found.setdefault(where, []).append((loop.name, index))
            sizes[where] = loop.length * gather.size_bytes
    return [Stack(tuple(gathers), sizes[where]) for where, gathers in found.items()]


def turning_stacks(
    program: Program, environment: Environment, plan: Plan, pairs: Sequence[tuple[Loop, Loop]]
) -> list[Stack]:
    """The stacks that a forward and a backward loop, with no loop around them, both gather.

    Args:
      program: fully sharded.
      environment: what it is for.
      plan: hands over nothing yet, or there is nothing left to hand over.
      pairs: forward and backward loops.
    """
    if plan.handed_over:
        return []
    names = {(forward.name, backward.name) for forward, backward in pairs if len(forward.path) == 1}
    stacked = stack_collectives(program, environment.mesh, plan.stacks)
    loops = {loop.name: loop for loop in find_loops(stacked.jaxpr)}
    return [
        Stack(((forward, index), (backward, index)), loops[forward].length * ahead[0].size_bytes)
        for forward, backward in sorted(names)
        for index, (ahead, _) in enumerate(shared_gathers(stacked, loops[forward], loops[backward]).gathers)
    ]


def handing_over(stacks: Iterable[Stack]) -> tuple[HandOver, ...]:
    """The decisions to hand over what ``turning_stacks`` found."""
    shared: dict[tuple[str, str], list[int]] = {}
    for stack in stacks:
        (forward, index), (backward, _) = stack.gathers
        shared.setdefault((forward, backward), []).append(index)
    return tuple(HandOver(*names, tuple(sorted(indices))) for names, indices in shared.items())


def most_bytes(stacks: Sequence[Stack], free_bytes: int) -> list[Stack]:
    """The stacks that together come closest to ``free_bytes`` from below. Among many stacks, the largest that fit."""
    if len(stacks) > _TRY_ALL:
        chosen = []
        for stack in sorted(stacks, key=lambda stack: -stack.size_bytes):
            if stack.size_bytes <= free_bytes:
                chosen.append(stack)
                free_bytes -= stack.size_bytes
        return chosen
    fitting = (some for some in _subsets(stacks) if total_bytes(some) <= free_bytes)
    return max(fitting, key=total_bytes, default=[])


def enough_bytes(stacks: Sequence[Stack], wanted_bytes: int) -> list[Stack]:
    """The stacks that together come closest to ``wanted_bytes`` from above. Among many, the largest until enough."""
    if len(stacks) > _TRY_ALL:
        chosen = []
        for stack in sorted(stacks, key=lambda stack: -stack.size_bytes):
            if total_bytes(chosen) < wanted_bytes:
                chosen.append(stack)
        return chosen
    enough = (some for some in _subsets(stacks) if total_bytes(some) >= wanted_bytes)
    return min(enough, key=total_bytes, default=list(stacks))


def _subsets(stacks: Sequence[Stack]) -> Iterator[list[Stack]]:
    return (list(some) for count in range(len(stacks) + 1) for some in combinations(stacks, count))


def total_bytes(stacks: Iterable[Stack]) -> int:
    """What ``stacks`` take, gathered."""
    return sum(stack.size_bytes for stack in stacks)


_TRY_ALL = 14
"""Up to this many stacks all combinations are looked at."""


def with_gathers(taken: Iterable[StackCollectives], stacks: Iterable[Stack]) -> tuple[StackCollectives, ...]:
    """``taken`` and the gathers of ``stacks``, one choice a loop."""
    choices = {choice.loop: choice for choice in taken}
    for stack in stacks:
        for loop, index in stack.gathers:
            now = choices.get(loop, StackCollectives(loop))
            choices[loop] = StackCollectives(loop, tuple(sorted({*now.gathers, index})), now.reductions)
    return tuple(choices[name] for name in sorted(choices))


def without_gathers(taken: Iterable[StackCollectives], stacks: Iterable[Stack]) -> tuple[StackCollectives, ...]:
    """``taken`` but for the gathers of ``stacks``."""
    dropped = {gather for stack in stacks for gather in stack.gathers}
    return tuple(
        replace(choice, gathers=tuple(index for index in choice.gathers if (choice.loop, index) not in dropped))
        for choice in taken
    )
