"""What is needed after a loop that communicates is gathered after it.

Before::

    c = scan(c); W = all_gather(w)

After::

    c = scan(c); w, _ = optimization_barrier(w, c); W = all_gather(w)

XLA's scheduler would gather as soon as it can: before the loop, where there is nothing to compute meanwhile, and the
whole value would stay in memory all the while. After a pipelined loop there is its last iteration, which runs apart.

Guarantees: values are bitwise the same, nothing is added to what is computed or communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from jax_deepcompile._jax_compat import is_drop_var, new_barrier
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.gathers import find_gathers, is_gather_loop
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import Walk
from jax_deepcompile.ir.traversal import inside
from jax_deepcompile.transforms.decision import Decision


@dataclass(frozen=True)
class GatherAfterLoops(Decision, kind="gather_after_loops"):
    """Gathers wait for the loops before what needs them."""

    def describe(self) -> str:
        return "what is needed after a loop is gathered after it"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[GatherAfterLoops]) -> Program:
        return gather_after_loops(program)


def gather_after_loops(program: Program) -> Program:
    """``program`` with gathers that wait for the loops before them; the same object if none has to."""
    return program.replace(jaxpr=_waiting(program.jaxpr))


def _waiting(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with a barrier in front of each gather that has to wait; the same object if there is none.

    What was gathered before, XLA does not gather again: it does not wait, or as the first gather did.
    """
    walk = Walk(closed, regions=_waiting)
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
        elif _communicates(eqn) and (left := _left(eqn)):
            ended, afterwards, waits = left, set(), True
        if waits:
            afterwards.update(eqn.outvars)
        walk.eqns.append(eqn)
    return walk.result()


def _communicates(eqn: Any) -> bool:
    """Whether ``eqn`` is a loop that gathers, and more than gathers."""
    if eqn.primitive.name != "scan" or is_gather_loop(eqn):
        return False
    return any(inner.primitive.name == "all_gather" for inner in inside(eqn))


def _left(loop: Any) -> list:
    """The first array of floats that is left of what a loop carries."""
    carried = [var for var in Scan(loop).results.carry if not is_drop_var(var)]
    return [var for var in carried if var.aval.ndim and jnp.issubdtype(var.aval.dtype, jnp.inexact)][:1]
