"""Parameters that stay gathered from the forward to the backward pass, outside of loops.

Before::

    W = all_gather(w); ... V = all_gather(barrier(w)); ... V ...

After::

    W = all_gather(w); ... W ...

Guarantees: values are bitwise the same; nothing is gathered more often; what is kept lives from its first to its last
use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import with_names
from jax_deepcompile.analysis.gathers import Gather, by_value, find_gathers
from jax_deepcompile.analysis.names import gather_names
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import closed_like
from jax_deepcompile.ir.program import Program
from jax_deepcompile.transforms.decision import Decision, positions
from jax_deepcompile.transforms.delay_reductions import IN_LOOPS

OF_LOOPS = (*IN_LOOPS, "delay_reductions", "microbatch_loops")
"""The kinds of decisions that change what is outside of loops, too."""


@dataclass(frozen=True)
class ReusedGathers(Decision, kind="unshard", after=OF_LOOPS):
    """Gathers outside of loops that repeat an earlier one, and read what that made.

    Attributes:
      gathers: those that are not done.
    """

    gathers: tuple[str, ...]

    def describe(self) -> str:
        return f"stay gathered: {', '.join(self.gathers)}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[ReusedGathers]) -> Program:
        repeated, known = repeated_gathers(program), {}
        for each in decisions:
            positions(each.gathers, list(repeated), "keeps gathered until used again")
            known |= {again.result: first.result for first, again in map(repeated.__getitem__, each.gathers)}
        if not known:
            return program
        return program.replace(jaxpr=closed_like(program.jaxpr, with_names(open_jaxpr(program.jaxpr), known)))


def repeated_gathers(program: Program) -> dict[str, tuple[Gather, Gather]]:
    """Pairs (first, again) of gathers of the same value outside of loops, by what the later ones are called."""
    jaxpr = open_jaxpr(program.jaxpr)
    pairs = [(first, each) for first, *again in by_value(find_gathers(jaxpr, jaxpr.invars)) for each in again]
    pairs.sort(key=lambda pair: pair[1].position)
    return dict(zip(gather_names(program, (), [again for _, again in pairs]), pairs, strict=True))
