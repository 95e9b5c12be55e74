"""How the loops around pipelined ones run: their trip counts hidden from XLA, forward beside backward where that helps.

XLA doubles the body of every loop whose trips it can count: what layer loops carry then changes buffers without a copy.
Around them it would double the whole program. ``hide_trip_counts`` and ``overlap_microbatches`` say how such a loop
runs; this decision is which of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.transforms.decision import Decision, loop_named, refused
from jax_deepcompile.transforms.hide_trip_counts import hidden_trip_count
from jax_deepcompile.transforms.overlap_microbatches import overlapped
from jax_deepcompile.transforms.replace_loops import replace_loops


@dataclass(frozen=True)
class MicrobatchLoop(Decision, kind="microbatch_loops"):
    """How one loop around others runs.

    Attributes:
      loop: the loop.
      overlap: whether the next iteration's forward pass runs beside this one's backward pass.
    """

    loop: str
    overlap: bool = False

    def subjects(self) -> tuple[str, ...]:
        return (self.loop,)

    def check(self, program: Program) -> None:
        loop = loop_named(program, self.loop, "says how to run")
        if not any(other.is_inside(loop) for other in find_loops(program)):
            raise refused(f"it says how to run {self.loop!r}, which has no loops in it")

    def describe(self) -> str:
        how = "forward of the next iteration beside backward" if self.overlap else "XLA does not see its trip count"
        return f"{self.loop}: {how}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[MicrobatchLoop]) -> Program:
        ways = {each.loop: overlapped if each.overlap else hidden_trip_count for each in decisions}
        return replace_loops(program, mesh, ways)
