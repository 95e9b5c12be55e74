"""The plan where collectives stop compute: what a loop gathers alike in every iteration is gathered once, before it.

There is nothing to hide communication under, so no schedule to try and nothing to compile before deciding. What
straight-line code gathers twice XLA:CPU merges by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from jax_deepcompile.analysis.gathers import Gather, hoistable_gathers
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.plan import KeptGathers, Plan


def keep_gathered(program: Program, free_bytes: float) -> Plan:
    """As many gathers as ``free_bytes`` of a device holds, loop by loop; ``program`` is fully sharded."""
    kept = []
    for loop in find_loops(program.jaxpr):
        positions, free_bytes = _as_many_as_fit(hoistable_gathers(loop.eqn), free_bytes)
        if positions:
            kept.append(KeptGathers(loop.name, positions))
    return Plan("").replace(kept=tuple(kept))


def _as_many_as_fit(gathers: Iterable[Gather], free_bytes: float) -> tuple[tuple[int, ...], float]:
    """Positions of the first gathers that fit, each value counted once, and the bytes left."""
    positions, held = [], set[tuple]()
    for position, gather in enumerate(gathers):
        needed_bytes = 0 if gather.key in held else gather.size_bytes
        if needed_bytes <= free_bytes:
            free_bytes -= needed_bytes
            held.add(gather.key)
            positions.append(position)
    return tuple(positions), free_bytes
