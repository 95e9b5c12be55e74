"""What loops over microbatches gather again and again is gathered once for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_deepcompile.analysis.gathers import first_uses, hoistable_gathers
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.layers import AS_READ
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.planner.unrolled import exposed_seconds
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names


@dataclass(frozen=True)
class UnshardMicrobatches:
    """Gathers that loops repeat are done once before them, those first that are waited for longest for their bytes."""

    name: str = "unshard_microbatches"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or best.plan.of(KeptGathers) or not best.waits:
            return
        program = best.plan.program(base, environment.mesh, until=AS_READ)
        repeats = [each for loop in find_loops(program) for each in repeats_of(program, loop, environment.costs)]
        free = budget.free_bytes(best, environment)
        choices = [
            budget.most_worth(repeats, lambda each: each.saved_s / each.size_bytes, share * free)
            for share in (1 / budget.BUFFER_OVERHEAD, 1.0)
        ]
        proposals = []
        for chosen in filter(None, choices):
            size = budget.total_bytes(chosen)
            loops = " and ".join(dict.fromkeys(each.loop for each in chosen))
            decision = f"{len(chosen)} of {len(repeats)} values are gathered once, before {loops}"
            plan = best.plan.having(KeptGathers, as_planned(chosen))
            proposals.append(Proposal(plan, f"{decision}, {size / 2**30:.2f} GiB"))
        yield from budget.ladder(proposals)


@dataclass(frozen=True)
class Repeat:
    """A value that a loop gathers in every iteration, once or several times.

    Attributes:
      saved_s: what gathering it once saves a step.
    """

    loop: str
    gathers: tuple[str, ...]
    saved_s: float
    size_bytes: int


_HIDDEN = 0.1
"""What a second of communication is worth that nothing waits for: with less of it, more of the rest is hidden."""


def repeats_of(program: Program, loop: Loop, costs: CostModel) -> list[Repeat]:
    """What ``loop`` gathers alike in every iteration."""
    body, gathers = loop.body, hoistable_gathers(loop.eqn)
    times, names = equation_times(body, program.mesh, costs), hoistable_names(program, loop)
    places = [gather.position for gather in gathers]
    waits_s = exposed_seconds(
        times, list(zip(places, first_uses(body, [gather.result for gather in gathers]), strict=True))
    )
    positions: dict[tuple, list[int]] = {}
    for position, gather in enumerate(gathers):
        positions.setdefault(gather.key, []).append(position)

    def saved_s(position: int) -> float:
        return waits_s[position] + _HIDDEN * (times[places[position]].network_s - waits_s[position])

    return [
        Repeat(
            loop.name,
            tuple(names[position] for position in alike),
            (loop.length - 1) * sum(map(saved_s, alike)),
            gathers[alike[0]].size_bytes,
        )
        for alike in positions.values()
    ]


def as_planned(chosen: Sequence[Repeat]) -> tuple[KeptGathers, ...]:
    """What a plan says of ``chosen``."""
    names: dict[str, list[str]] = {}
    for repeat in chosen:
        names.setdefault(repeat.loop, []).extend(repeat.gathers)
    return tuple(KeptGathers(loop, tuple(kept)) for loop, kept in sorted(names.items()))
