"""Gathers of unrolled layers start just early enough to be hidden, as memory has room for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.planner.unrolled import room_bytes, waits, without_starts
from jax_deepcompile.transforms.prefetch import Prefetch, choose_prefetches, parameter_gathers


@dataclass(frozen=True)
class PrefetchGathers:
    """Every gather outside of loops starts just early enough to be hidden, but not before memory has room for it.

    Attributes:
      slacks: how early, in times of what the gather takes; one proposal each.
      fewest: gathers that are worth it.
    """

    slacks: tuple[float, ...] = (1.25, 2.0)
    fewest: int = 8
    name: str = "prefetch"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if not waits(base, best):
            return
        program = without_starts(base, best.plan, environment)
        gathers = len(parameter_gathers(program))
        if gathers < self.fewest:
            return
        room = room_bytes(program, best, environment)
        less = None if room is None else [size - budget.UNFORESEEN * (environment.limit_bytes or 0) for size in room]
        for slack in self.slacks:
            early, later = (choose_prefetches(program, environment.costs, slack, each) for each in (room, less))
            decision = f"of {gathers} gathers start {slack:g} times their duration ahead"
            if early:
                yield from budget.ladder(
                    Proposal(best.plan.having(Prefetch, starts), f"{len(starts)} {decision}{said}")
                    for starts, said in ({later: ", with room to spare"} | {early: ""}).items()
                )
