"""Gradients of layers kept in the type that they were reduced in.

Before::

    g = scan(t): g[t] = convert(reduce_scatter(p), float32)

After::

    h = scan(t): h[t] = reduce_scatter(p)
    g = convert(h, float32)

The stack takes half the memory until the optimizer has read it, which widens what it reads as it reads it.

Guarantees: values are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from jax_deepcompile._jax_compat import new_jaxpr, open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.loops import find_loops, reduces_gradients
from jax_deepcompile.analysis.work import fuses
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, replace_equations, rerun
from jax_deepcompile.transforms.decision import Decision


@dataclass(frozen=True)
class NarrowStacks(Decision, kind="narrow_stacks", says="gradients of layers stay in the type they were reduced in"):
    """Stacks of gradients stay in the type that they were reduced in until they are read."""

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[NarrowStacks]) -> Program:
        scopes = {loop.path: loop.body for loop in find_loops(program)} | {(): open_jaxpr(program.jaxpr)}
        reducing = [loop for loop in find_loops(program) if reduces_gradients(loop.eqn)]
        narrow = {id(loop.eqn): _narrow(scopes[loop.path[:-1]], loop.eqn) for loop in reducing}
        return replace_equations(program, mesh, {key: _widening_after(found) for key, found in narrow.items() if found})


def _narrow(scope: Any, loop: Any) -> dict[int, Any]:
    """By the position of each stack that is read by what XLA fuses alone, what its slices are widened from."""
    read_whole = {atom for eqn in scope.eqns if not fuses(eqn) for atom in variables(eqn.invars)}
    read_whole.update(variables(scope.outvars))
    body = Scan(loop).body
    num_carry = Scan(loop).num_carry
    widened = {eqn.outvars[0]: eqn.invars[0] for eqn in body.eqns if eqn.primitive.name == "convert_element_type"}
    found = {}
    for index, (slice_, stack) in enumerate(zip(body.outvars, loop.outvars, strict=True)):
        source = widened.get(slice_) if variables([slice_]) else None
        if index < num_carry or source is None or not variables([source]) or stack in read_whole:
            continue
        if source.aval.dtype.itemsize < stack.aval.dtype.itemsize:
            found[index] = source
    return found


def _widening_after(narrow: dict[int, Any]) -> Compute:
    def run(eqn: Any, operands: list) -> list:
        body = Scan(eqn).body
        outvars = [narrow.get(index, slice_) for index, slice_ in enumerate(body.outvars)]
        stacks = rerun(eqn, new_jaxpr([*body.constvars, *body.invars], outvars, body.eqns), operands)
        for index in narrow:
            stacks[index] = lax.convert_element_type(stacks[index], eqn.outvars[index].aval.dtype)
        return stacks

    return run
