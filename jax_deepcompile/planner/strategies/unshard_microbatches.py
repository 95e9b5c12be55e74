"""What every microbatch gathers alike: gathered once for all of them, as far as memory holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import first_uses, hoistable_gathers
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.apply import apply_loops
from jax_deepcompile.planner.candidate import Environment, Trial
from jax_deepcompile.planner.plan import KeptGathers
from jax_deepcompile.planner.search import Proposal
from jax_deepcompile.planner.strategies.straight_line import exposed_seconds


@dataclass(frozen=True)
class UnshardMicrobatches:
    """Gathers that loops repeat are done once before them, those first that are waited for longest for their bytes."""

    name: str = "unshard_microbatches"

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or now.plan.kept or not now.waits:
            return
        program = apply_loops(base, environment.mesh, now.plan)
        repeats = [
            each for loop in find_loops(program.jaxpr) for each in repeats_of(loop, program.mesh, environment.costs)
        ]
        free_bytes = environment.limit_bytes - now.prediction.peak_bytes
        proposal = None
        for chosen in dict.fromkeys(choose_kept(repeats, share * free_bytes) for share in (_SURELY, 1.0)):
            if chosen:
                size = sum(repeat.size_bytes for repeat in chosen)
                decision = f"{len(chosen)} of {len(repeats)} values are gathered once for all microbatches"
                plan = now.plan.replace(kept=as_planned(chosen))
                proposal = Proposal(plan, f"{decision}, {size / 2**30:.2f} GiB", otherwise=proposal)
        if proposal is not None:
            yield proposal


_SURELY = 0.8
"""The share of free memory that what is kept surely finds room in: buffers lie less well."""


@dataclass(frozen=True)
class Repeat:
    """A value that a loop gathers in every iteration, once or several times.

    Attributes:
      loop: its name.
      positions: of these gathers, among all in it that are the same every iteration.
      saved_s: what gathering it once saves a step.
      size_bytes: of the whole value.
    """

    loop: str
    positions: tuple[int, ...]
    saved_s: float
    size_bytes: int


_HIDDEN = 0.1
"""What a second of communication is worth that nothing waits for: with less of it, more of the rest is hidden."""


def repeats_of(loop: Loop, mesh: MeshAxes, costs: CostModel) -> list[Repeat]:
    """What ``loop`` gathers alike in every iteration."""
    body, gathers = open_jaxpr(loop.eqn.params["jaxpr"]), hoistable_gathers(loop.eqn)
    times = equation_times(body, mesh, costs)
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
            tuple(alike),
            (loop.length - 1) * sum(map(saved_s, alike)),
            gathers[alike[0]].size_bytes,
        )
        for alike in positions.values()
    ]


def choose_kept(repeats: Sequence[Repeat], free_bytes: float) -> tuple[Repeat, ...]:
    """Those that save most for their bytes, as many as ``free_bytes`` holds together."""
    chosen = []
    for repeat in sorted(repeats, key=lambda repeat: -repeat.saved_s / repeat.size_bytes):
        if repeat.saved_s > 0 and repeat.size_bytes <= free_bytes:
            free_bytes -= repeat.size_bytes
            chosen.append(repeat)
    return tuple(chosen)


def as_planned(chosen: Sequence[Repeat]) -> tuple[KeptGathers, ...]:
    """What a plan says of ``chosen``."""
    positions: dict[str, list[int]] = {}
    for repeat in chosen:
        positions.setdefault(repeat.loop, []).extend(repeat.positions)
    return tuple(KeptGathers(loop, tuple(sorted(kept))) for loop, kept in sorted(positions.items()))
