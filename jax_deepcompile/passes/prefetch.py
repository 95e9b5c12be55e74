"""Straight-line gathers that start just early enough.

A gather of parameters could start at once, as nothing before it is needed; then all of them would, and fill the
memory. It could wait for the activation that meets it; then nothing hides it. Between the two there is, for every
gather, the latest start that still hides it: the network is one queue, so walking it backwards from the uses gives
every gather its slot.

Before::

    V = all_gather(barrier(w, y2)); y3 = dot(y2, V)

After, where computing ``y2`` from ``y1`` takes as long as the gather::

    V = all_gather(barrier(w, y1)); y2 = ...; y3 = dot(y2, V)

Guarantees: values are bitwise the same, nothing is gathered more or less often, and no gather starts later than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, new_var, open_jaxpr, optimization_barrier_p
from jax_deepcompile.analysis.dataflow import needed_for, slim_barriers, variables
from jax_deepcompile.analysis.gathers import Gather, find_gathers, outermost, slice_of
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.program import Program


@dataclass(frozen=True)
class Prefetch:
    """When one gather starts.

    Attributes:
      gather: its place among the straight-line gathers of parameters.
      after: position of the equation, in the program before the pass, whose result it waits for.
    """

    gather: int
    after: int


def choose_prefetches(program: Program, costs: CostModel, slack: float = 1.25) -> tuple[Prefetch, ...]:
    """The latest start of every straight-line gather that still hides it, with ``slack`` times its duration.

    Gathers that would start with the program need no decision and get none.
    """
    jaxpr = open_jaxpr(program.jaxpr)
    gathers = parameter_gathers(program)
    times = equation_times(jaxpr, program.mesh, costs)
    starts = _clock(times)
    anchors = [index for index, eqn in enumerate(jaxpr.eqns) if _is_anchor(eqn)]
    uses = _first_uses(jaxpr, [gather.result for gather in gathers])
    chosen = []
    queue_free_s = float("inf")
    order = sorted(range(len(gathers)), key=lambda index: -uses[index])
    for index in order:
        needed_s = min(starts[uses[index]], queue_free_s)
        start_s = needed_s - slack * times[gathers[index].position].network_s
        queue_free_s = start_s
        before = [anchor for anchor in anchors if anchor < uses[index] and starts[anchor + 1] <= start_s]
        if before:
            chosen.append(Prefetch(index, before[-1]))
    return tuple(sorted(chosen, key=lambda prefetch: prefetch.gather))


def prefetch(program: Program, decisions: Sequence[Prefetch]) -> Program:
    """``program`` with its gathers pinned as decided; every other barrier before a gather of parameters is dropped."""
    if not decisions:
        return program
    jaxpr = open_jaxpr(program.jaxpr)
    gathers = parameter_gathers(program)
    pinned = {gathers[decision.gather].position: decision.after for decision in decisions}
    eqns = _pin(jaxpr, gathers, pinned)
    flat = jaxpr.replace(eqns=slim_barriers(needed_for(eqns, jaxpr.outvars), jaxpr.outvars))
    return program.replace(jaxpr=type(program.jaxpr)(flat, closed_consts(program.jaxpr)))


def parameter_gathers(program: Program) -> tuple[Gather, ...]:
    """The straight-line gathers of what came in, in program order."""
    jaxpr = open_jaxpr(program.jaxpr)
    return outermost(find_gathers(jaxpr, jaxpr.invars))


def _pin(jaxpr: Any, gathers: Sequence[Gather], pinned: dict[int, int]) -> list:
    """Makes every gather anew from what came in, behind a barrier on what it shall wait for, if on anything."""
    results = {gather.position: gather.result for gather in gathers}
    known: dict = {}
    eqns: list = []
    for index, eqn in enumerate(jaxpr.eqns):
        if index not in results:
            eqns.append(eqn.replace(invars=[_read(atom, known) for atom in eqn.invars]))
            continue
        anchor = jaxpr.eqns[pinned[index]].outvars[0] if index in pinned else None
        again, known[results[index]] = _copy(slice_of(jaxpr, [results[index]]), results[index], anchor)
        eqns += again
    return eqns


def _copy(chain: list, result: Any, anchor: Any) -> tuple[list, Any]:
    """``chain`` with new variables, its first gather tied to ``anchor``, and what ``result`` is called in it."""
    known: dict = {}
    eqns: list = []
    for eqn in chain:
        operands = [_read(atom, known) for atom in eqn.invars]
        if eqn.primitive.name == "all_gather" and anchor is not None:
            held, ignored = new_var(operands[0].aval), new_var(anchor.aval)
            eqns.append(
                jex.new_jaxpr_eqn(
                    [operands[0], anchor], [held, ignored], optimization_barrier_p, {}, jex.no_effects, eqn.source_info
                )
            )
            operands, anchor = [held], None
        outvars = [new_var(var.aval) for var in eqn.outvars]
        known.update(zip(eqn.outvars, outvars, strict=True))
        eqns.append(eqn.replace(invars=operands, outvars=outvars))
    return eqns, known[result]


def _read(atom: Any, known: dict) -> Any:
    return atom if isinstance(atom, jex.Literal) else known.get(atom, atom)


def _clock(times: Sequence) -> list[float]:
    """When each equation would start if only compute took time; and the end."""
    starts = [0.0]
    for time in times:
        starts.append(starts[-1] + time.compute_s)
    return starts


def _is_anchor(eqn: Any) -> bool:
    """Whether the end of ``eqn`` marks a time: one array that compute makes."""
    return eqn.primitive.name == "dot_general" or (
        eqn.primitive.name == "scan" and bool(eqn.outvars) and bool(eqn.outvars[0].aval.shape)
    )


def _first_uses(jaxpr: Any, results: Sequence) -> list[int]:
    first: dict = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for atom in variables(eqn.invars):
            first.setdefault(atom, index)
    return [first.get(result, len(jaxpr.eqns) - 1) for result in results]
