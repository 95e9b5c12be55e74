"""What surrounds a loop that communicates is reduced before it or gathered after it.

XLA's scheduler would rather reduce after a loop, or even make the gradient there, and gather as soon as it can: before
a loop, where there is nothing to compute meanwhile. Whole values would stay in memory all the while. After a pipelined
loop there is its last iteration, which runs apart, to hide a gather under.

Before::

    p = dot(x, y); g = reduce_scatter(p); c = scan(c); W = all_gather(w)

After::

    p = dot(x, y); g = reduce_scatter(p); c, _ = optimization_barrier(c, g); c = scan(c)
    w, _ = optimization_barrier(w, c); W = all_gather(w)

Guarantees: values are bitwise the same, nothing is added to what is computed or communicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jax_deepcompile._jax_compat import is_drop_var, new_barrier
from jax_deepcompile.analysis.dataflow import needed_for
from jax_deepcompile.analysis.gathers import find_gathers, is_gather_loop
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import Walk, renamed, with_renamed_operands
from jax_deepcompile.ir.traversal import contains, reached_from, variables
from jax_deepcompile.transforms.decision import Decision


@dataclass(frozen=True)
class ReduceBeforeLoops(
    Decision, kind="reduce_before_loops", says="gradients that are ready before a loop are reduced before it"
):
    """Loops that communicate wait for the reductions before them."""

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[ReduceBeforeLoops]) -> Program:
        return program.replace(jaxpr=_reducing_before(program.jaxpr))


@dataclass(frozen=True)
class GatherAfterLoops(Decision, kind="gather_after_loops", says="what is needed after a loop is gathered after it"):
    """Gathers wait for the loops before what needs them."""

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[GatherAfterLoops]) -> Program:
        return program.replace(jaxpr=_gathering_after(program.jaxpr))


def _reducing_before(closed: Any) -> Any:
    """``closed`` with a barrier in front of each loop that has to wait; the same object if there is none."""
    walk = Walk(closed, regions=_reducing_before, within={"scan"})
    body, eqns = walk.jaxpr, walk.eqns
    ready: list = []
    for index, eqn in enumerate(walk):
        if eqn.primitive.name == "reduce_scatter":
            ready += eqn.outvars
        elif ready and (held := _held(eqn, eqns, ready)):
            waited = {var for other in needed_for(eqns, eqn.invars, effects=False) for var in other.outvars}
            reduced = reached_from(eqns, [var for var in ready if var not in waited])
            later = variables([*body.outvars, *(atom for other in body.eqns[index + 1 :] for atom in other.invars)])
            others = [var for var in dict.fromkeys(renamed(atom, walk.names) for atom in later) if var in reduced]
            if others:
                barrier = new_barrier([*held, *others], eqn.source_info)
                walk.names.update(zip(barrier.invars, barrier.outvars, strict=True))
                eqns.append(barrier)
                eqn = with_renamed_operands(eqn, walk.names)
            ready = []
        eqns.append(eqn)
    return walk.result()


def _held(eqn, before: list, reduced: list) -> list:
    """What of an equation's operands is made to wait; nothing for most.

    Of a loop that communicates it is the first array of floats that it carries; of a barrier at the end of a layer, one
    that a reduction passes already, the first array of floats.
    """
    if eqn.primitive.name == "scan" and contains(eqn, {"all_gather", "reduce_scatter"}):
        return _first_of_floats(variables(Scan(eqn).operands.carry))
    if eqn.primitive.name != "optimization_barrier":
        return []
    operands = variables(eqn.invars)
    return [] if reached_from(before, reduced).isdisjoint(operands) else _first_of_floats(operands)


def _first_of_floats(variables: Iterable) -> list:
    return [var for var in variables if var.aval.ndim and jnp.issubdtype(var.aval.dtype, jnp.inexact)][:1]


def _gathering_after(closed: Any) -> Any:
    """``closed`` with a barrier in front of each gather that has to wait; the same object if there is none.

    What was gathered before, XLA does not gather again: it does not wait, or as the first gather did.
    """
    walk = Walk(closed, regions=_gathering_after)
    keys = {gather.result: gather.key for gather in find_gathers(walk.jaxpr, walk.jaxpr.invars)}
    ready: set = set()
    waited: dict = {}
    ended: list = []
    afterwards: set = set()
    for eqn in walk:
        waits = not afterwards.isdisjoint(variables(eqn.invars))
        if eqn.primitive.name == "all_gather":
            key = keys.get(eqn.outvars[0])
            if ended and not waits and (key is None or key not in ready):
                operand = eqn.invars[0]
                if operand not in waited:
                    walk.eqns.append(new_barrier([operand, *ended], eqn.source_info))
                    waited[operand] = walk.eqns[-1].outvars[0]
                eqn = eqn.replace(invars=[waited[operand]])
                waits = True
            elif not waits:
                ready.add(key)
        elif eqn.primitive.name == "scan" and not is_gather_loop(eqn) and contains(eqn, {"all_gather"}):
            left = _first_of_floats(var for var in Scan(eqn).results.carry if not is_drop_var(var))
            if left:
                ended, afterwards, waits = left, set(), True
        if waits:
            afterwards.update(eqn.outvars)
        walk.eqns.append(eqn)
    return walk.result()
