"""Gathers outside of loops that start just early enough.

A gather of parameters could start at once, as nothing before it is needed; then all of them would, and fill the
memory. It could wait for the activation that meets it; then nothing hides it. Between the two there is, for every
gather, the latest start that still hides it: the network is one queue, so walking it backwards from the uses gives
every gather its slot. Where memory has no room so early, the gather starts as soon as it has.

Before::

    y2 = dot(y1, W); V = all_gather(v); y3 = dot(y2, V)

After, where computing ``y2`` takes as long as the gather::

    V = all_gather(barrier(v, y1)); y2 = dot(y1, W); y3 = dot(y2, V)

Guarantees: values are bitwise the same; nothing is gathered more or less often; a gather waits only for what its use
needs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from jax_deepcompile._jax_compat import new_barrier, new_var, open_jaxpr
from jax_deepcompile.analysis.dataflow import needs, slim_barriers
from jax_deepcompile.analysis.gathers import Gather, find_gathers, first_uses, outermost, slicer
from jax_deepcompile.analysis.names import gather_names, value_names
from jax_deepcompile.analysis.work import is_anchor
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.lineage import members
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import closed_like
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import Walk, with_renamed_operands
from jax_deepcompile.transforms.decision import Decision, positions, refused
from jax_deepcompile.transforms.unshard import OF_LOOPS


@dataclass(frozen=True)
class Prefetch(Decision, kind="prefetch", after=(*OF_LOOPS, "unshard"), about=("gather",)):
    """When one gather outside of loops starts.

    Attributes:
      gather: of a parameter.
      after: the value that it waits for, by the scope that computes it.
    """

    gather: str
    after: str

    def describe(self) -> str:
        return f"gather of {self.gather}: starts after {self.after}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[Prefetch]) -> Program:
        jaxpr, gathers = open_jaxpr(program.jaxpr), parameter_gathers(program)
        known, what = gather_names(program, (), gathers), "starts the gather of"
        starting = positions([each.gather for each in decisions], known, what)
        values = {name: var for var, name in value_names(jaxpr, phased=True).items()}
        makers = {var: place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        uses = first_uses(jaxpr, [gather.result for gather in gathers])
        results = {gathers[place].result for place in starting}
        moved: dict[int, list[Gather]] = {}
        for each, place in sorted(zip(decisions, starting, strict=True), key=lambda pair: pair[1]):
            positions([each.after], list(values), f"{what} {each.gather!r} after")
            anchor = makers[values[each.after]]
            if anchor >= uses[place] or results.intersection(jaxpr.eqns[anchor].outvars):
                raise refused(f"it {what} {each.gather!r} after {each.after!r}, which it cannot wait for")
            moved.setdefault(anchor, []).append(gathers[place])
        if not moved:
            return program
        flat = _moved(jaxpr, moved)
        flat = flat.replace(eqns=slim_barriers(flat.eqns, flat.outvars))
        return program.replace(jaxpr=closed_like(program.jaxpr, flat))


def choose_prefetches(
    program: Program, costs: CostModel, slack: float = 1.25, room_bytes: Sequence[float] | None = None
) -> tuple[Prefetch, ...]:
    """The latest start of every gather outside of loops that still hides it; the earliest with room, if that is later.

    Gathers that would start with the program need no decision and get none.

    Args:
      slack: how much longer than it takes a gather is given.
      room_bytes: what is free while each equation runs as ``program`` has them; None where that is enough.
    """
    jaxpr = open_jaxpr(program.jaxpr)
    gathers = parameter_gathers(program)
    times = equation_times(jaxpr, program.mesh, costs)
    starts = [0.0, *accumulate(time.compute_s for time in times)]
    network = {eqn.outvars[0]: time.network_s for eqn, time in zip(jaxpr.eqns, times, strict=True) if eqn.outvars}
    uses = first_uses(jaxpr, [gather.result for gather in gathers])
    anchors = needs(jaxpr.eqns, is_anchor)
    values, names = value_names(jaxpr, phased=True), gather_names(program, (), gathers)
    slice_for, queue_free_s = slicer(jaxpr), float("inf")
    room = np.full(len(jaxpr.eqns), np.inf) if room_bytes is None else np.array(room_bytes, float)
    chosen = []
    used = [index for index in range(len(gathers)) if uses[index] < len(jaxpr.eqns)]
    for index in sorted(used, key=lambda index: -uses[index]):
        gather = gathers[index]
        lasting_s = sum(network[eqn.outvars[0]] for eqn in slice_for([gather.result]))
        queue_free_s = min(starts[uses[index]], queue_free_s) - slack * lasting_s
        possible = list(members(anchors[uses[index]]))
        first = _first_with_room(room, gather)
        hiding = (anchor for anchor in possible if starts[anchor + 1] <= queue_free_s)
        anchor = next(hiding, None)
        if possible and (-1 if anchor is None else anchor) + 1 < first:
            anchor = min((later for later in possible if later + 1 >= first), default=possible[0])
            queue_free_s = max(queue_free_s, starts[anchor + 1])
        room[0 if anchor is None else anchor + 1 : gather.position] -= gather.size_bytes
        if anchor is not None:
            chosen.append((index, Prefetch(names[index], values[jaxpr.eqns[anchor].outvars[0]])))
    return tuple(decision for _, decision in sorted(chosen, key=lambda each: each[0]))


def _first_with_room(room: np.ndarray, gather: Gather) -> int:
    """Position of the first equation from which on what ``gather`` makes may be there."""
    full = np.flatnonzero(room[: gather.position] < gather.size_bytes)
    return int(full[-1]) + 1 if full.size else 0


def parameter_gathers(program: Program) -> tuple[Gather, ...]:
    """The gathers outside of loops of what came in, in program order."""
    jaxpr = open_jaxpr(program.jaxpr)
    return outermost(find_gathers(jaxpr, jaxpr.invars))


def _moved(jaxpr: Any, moved: dict[int, list[Gather]]) -> Any:
    """``jaxpr`` with each gather made anew from what came in, right after what it waits for."""
    results = {gather.result for gathers in moved.values() for gather in gathers}
    slice_for = slicer(jaxpr)
    walk = Walk(jaxpr)
    for index, eqn in enumerate(walk):
        if not results.intersection(eqn.outvars):
            walk.eqns.append(eqn)
        for gather in moved.get(index, ()):
            again, walk.names[gather.result] = _copy(slice_for([gather.result]), gather.result, eqn.outvars[0])
            walk.eqns += again
    return walk.result()


def _copy(chain: list, result: Any, anchor: Any) -> tuple[list, Any]:
    """``chain`` with new variables, its first gather tied to ``anchor``, and what ``result`` is called in it."""
    known: dict = {}
    eqns: list = []
    for eqn in chain:
        operands = with_renamed_operands(eqn, known).invars
        if eqn.primitive.name == "all_gather" and anchor is not None:
            eqns.append(new_barrier([operands[0], anchor], eqn.source_info))
            operands, anchor = eqns[-1].outvars[:1], None
        outvars = [new_var(var.aval) for var in eqn.outvars]
        known.update(zip(eqn.outvars, outvars, strict=True))
        eqns.append(eqn.replace(invars=operands, outvars=outvars))
    return eqns, known[result]
