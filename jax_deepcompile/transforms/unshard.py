"""Parameters that stay gathered from the forward to the backward pass, outside of loops.

Before::

    W = all_gather(w); ... V = all_gather(barrier(w)); ... V ...

After::

    W = all_gather(w); ... W ...

Guarantees: values are bitwise the same; nothing is gathered more often; what is kept lives from its first to its last
use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import with_names
from jax_deepcompile.analysis.gathers import Gather, find_gathers
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

    def check(self, program: Program) -> None:
        _chosen(program, self)

    def describe(self) -> str:
        return f"stay gathered: {', '.join(self.gathers)}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[ReusedGathers]) -> Program:
        jaxpr = open_jaxpr(program.jaxpr)
        again = {later.position for each in decisions for later in _chosen(program, each)}
        if not again:
            return program
        kept = keep_until_backward(jaxpr, jaxpr.invars, again)
        return program.replace(jaxpr=closed_like(program.jaxpr, kept))


def repeated_gathers(program: Program) -> dict[str, tuple[Gather, Gather]]:
    """``regathers`` of ``program`` by what the later ones are called."""
    jaxpr = open_jaxpr(program.jaxpr)
    pairs = regathers(jaxpr, jaxpr.invars)
    return dict(zip(gather_names(program, (), [again for _, again in pairs]), pairs, strict=True))


def _chosen(program: Program, choice: ReusedGathers) -> list[Gather]:
    known = repeated_gathers(program)
    pairs = list(known.values())
    return [pairs[place][1] for place in positions(choice.gathers, list(known), "keeps gathered until used again")]


def regathers(jaxpr: Any, sources: Sequence) -> tuple[tuple[Gather, Gather], ...]:
    """Pairs (first, again) of gathers of the same value in code outside of loops."""
    first: dict = {}
    pairs = []
    for gather in find_gathers(jaxpr, sources):
        if gather.key in first:
            pairs.append((first[gather.key], gather))
        else:
            first[gather.key] = gather
    return tuple(pairs)


def keep_until_backward(jaxpr: Any, sources: Sequence, again: Collection[int]) -> jex.Jaxpr:
    """``jaxpr`` with the later gathers at the positions ``again`` replaced by what the first one made."""
    flat = open_jaxpr(jaxpr)
    known = {later.result: first.result for first, later in regathers(flat, sources) if later.position in again}
    return with_names(flat, known)
