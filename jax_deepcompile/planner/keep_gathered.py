"""What loops gather alike in every iteration, gathered once before them.

Where collectives stop compute that is all there is to plan: there is nothing to hide communication under, so no
schedule to try and nothing to compile before deciding. What is gathered twice outside of loops XLA:CPU merges.
"""

from __future__ import annotations

from collections.abc import Iterable

from jax_deepcompile.analysis.gathers import Gather, hoistable_gathers
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.program import Program
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names


def keep_gathered(program: Program, free_bytes: float) -> tuple[KeptGathers, ...]:
    """As many gathers as ``free_bytes`` of a device holds, loop by loop; ``program`` is fully sharded."""
    kept = []
    for loop in find_loops(program):
        positions, free_bytes = _as_many_as_fit(hoistable_gathers(loop.eqn), free_bytes)
        if positions:
            names = hoistable_names(program, loop)
            kept.append(KeptGathers(loop.name, tuple(names[position] for position in positions)))
    return tuple(kept)


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
