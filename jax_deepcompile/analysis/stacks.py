"""What a layer loop gathers of, and reduces into, its stacks: it could be done outside of the loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jax.extend import core as jex

from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.gathers import Gather, by_value, find_gathers, outermost
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import CHEAP, DEVICE_SUMS, Scan


@dataclass(frozen=True)
class Reduction:
    """One stacked output of a loop that nothing in the loop reads once it is reduced over devices.

    Attributes:
      output: its position among the stacked outputs.
      operand: the variable of the body that is reduced.
      eqns: the reduction, and the casts and reshapes after it.
      size_bytes: of the operand, one iteration's.
    """

    output: int
    operand: jex.Var
    eqns: tuple
    size_bytes: int


def sliced_gathers(eqn) -> tuple[tuple[Gather, ...], ...]:
    """The gathers in a scan's body that are made of one slice of one stack, those of the same value together."""
    found = outermost(find_gathers(Scan(eqn).body, Scan(eqn).inputs.xs))
    return by_value(gather for gather in found if len(gather.sources) == 1)


def stacked_reductions(eqn) -> tuple[Reduction, ...]:
    """The stacked outputs of a scan that a reduction over devices makes, directly or cast and reshaped."""
    body = Scan(eqn).body
    maker = {var: inner for inner in body.eqns for var in inner.outvars}
    uses = Counter(atom for inner in body.eqns for atom in variables(inner.invars))
    uses.update(variables(body.outvars))
    found = []
    for output, atom in enumerate(Scan(eqn).outputs.ys):
        chain: list = []
        while isinstance(atom, jex.Var) and atom in maker and uses[atom] == 1:
            inner = maker[atom]
            operands = variables(inner.invars)
            if len(operands) != 1 or len(inner.outvars) != 1:
                break
            chain.append(inner)
            atom = operands[0]
            if inner.primitive.name in DEVICE_SUMS:
                found.append(Reduction(output, atom, tuple(reversed(chain)), size_bytes(atom)))
                break
            if inner.primitive.name not in CHEAP and not _sums_nothing(inner):
                break
    return tuple(found)


def _sums_nothing(eqn) -> bool:
    """A sum over dimensions of size 1, as broadcasts leave behind in backward passes."""
    return eqn.primitive.name == "reduce_sum" and size_bytes(eqn.invars[0]) == size_bytes(eqn.outvars[0])
