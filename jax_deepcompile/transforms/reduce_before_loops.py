"""Gradients that are ready before a loop are reduced before it.

Before::

    p = dot(x, y); g = reduce_scatter(p); c = scan(c)

After::

    p = dot(x, y); g = reduce_scatter(p); c, _ = optimization_barrier(c, g); c = scan(c)

XLA's scheduler would rather reduce after the loop, or even make the gradient there. It cannot overlap the reduction
with a loop that communicates, and the whole gradient, or what it is made of, would stay in memory all the while.

Guarantees: values are bitwise the same, nothing is added to what is computed or communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jax_deepcompile._jax_compat import closed_consts, new_barrier, open_jaxpr, scan_counts
from jax_deepcompile.analysis.dataflow import needed_for, reached_from, renamed, variables
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import equations, nested_jaxprs
from jax_deepcompile.transforms.decision import Decision


@dataclass(frozen=True)
class ReduceBeforeLoops(Decision, kind="reduce_before_loops"):
    """Loops that communicate wait for the reductions before them."""

    def describe(self) -> str:
        return "gradients that are ready before a loop are reduced before it"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[ReduceBeforeLoops]) -> Program:
        return reduce_before_loops(program)


def reduce_before_loops(program: Program) -> Program:
    """``program`` with loops that wait for the reductions before them; the same object if none has to."""
    body = _waiting(open_jaxpr(program.jaxpr))
    if body is open_jaxpr(program.jaxpr):
        return program
    return program.replace(jaxpr=type(program.jaxpr)(body, closed_consts(program.jaxpr)))


def _waiting(body: Any) -> Any:
    """``body`` with a barrier in front of each loop that has to wait; the same object if there is none."""
    known: dict = {}
    eqns: list = []
    ready: list = []
    for index, original in enumerate(body.eqns):
        eqn = _renamed(_inside(original), known)
        if eqn.primitive.name == "reduce_scatter":
            ready += eqn.outvars
        elif ready and (held := _held(eqn, eqns, ready)):
            waited = {var for other in needed_for(eqns, eqn.invars, effects=False) for var in other.outvars}
            reduced = reached_from(eqns, [var for var in ready if var not in waited])
            later = variables([*body.outvars, *(atom for other in body.eqns[index + 1 :] for atom in other.invars)])
            others = [var for var in dict.fromkeys(renamed(atom, known) for atom in later) if var in reduced]
            if others:
                barrier = new_barrier([*held, *others], eqn.source_info)
                known |= dict(zip(barrier.invars, barrier.outvars, strict=True))
                eqns.append(barrier)
                eqn = _renamed(eqn, known)
            ready = []
        eqns.append(eqn)
    if len(eqns) == len(body.eqns) and all(new is old for new, old in zip(eqns, body.eqns, strict=True)):
        return body
    return body.replace(eqns=eqns, outvars=[renamed(atom, known) for atom in body.outvars])


def _renamed(eqn, known: dict) -> Any:
    invars = [renamed(atom, known) for atom in eqn.invars]
    return eqn if invars == eqn.invars else eqn.replace(invars=invars)


def _inside(eqn) -> Any:
    if eqn.primitive.name != "scan":
        return eqn
    closed = eqn.params["jaxpr"]
    body = _waiting(open_jaxpr(closed))
    if body is open_jaxpr(closed):
        return eqn
    return eqn.replace(params=eqn.params | {"jaxpr": type(closed)(body, closed_consts(closed))})


def _communicates(eqn) -> bool:
    names = {inner.primitive.name for body in nested_jaxprs(eqn) for inner in equations(body)}
    return not names.isdisjoint({"all_gather", "reduce_scatter"})


def _held(eqn, before: list, reduced: list) -> list:
    """What of an equation's operands is made to wait; nothing for most.

    Of a loop that communicates it is the first array of floats that it carries; of a barrier at the end of a layer, one
    that a reduction passes already, the first array of floats.
    """
    candidates: list = []
    if eqn.primitive.name == "scan" and _communicates(eqn):
        num_consts, num_carry = scan_counts(eqn)
        candidates = variables(eqn.invars[num_consts : num_consts + num_carry])
    elif eqn.primitive.name == "optimization_barrier":
        operands = variables(eqn.invars)
        candidates = [] if reached_from(before, reduced).isdisjoint(operands) else operands
    return [var for var in candidates if var.aval.ndim and jnp.issubdtype(var.aval.dtype, jnp.inexact)][:1]
