"""Sums over microbatches added up in the layer loop that makes their terms.

Before, in a loop over microbatches that carries the sum ``s``::

    g = scan(t): g[t] = reduce_scatter(p)
    s = s + g

After::

    s = scan(t): s[t] = s[t] + reduce_scatter(p)

No second stack of gradients is filled, added and thrown away; a pipelined loop adds in place. Loops that reduce no
gradients, of metrics say, stay independent of earlier microbatches.

Guarantees: values are bitwise the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.analysis.dataflow import alike, variables
from jax_deepcompile.analysis.loops import find_loops, reduces_gradients
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import ADDITIONS, Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, ReadingMore, Replacement, replace_equations, rescan
from jax_deepcompile.transforms.decision import Decision


@dataclass(frozen=True)
class _Sum:
    """One stacked output of a loop that is only added to a stack which was there before the loop.

    Attributes:
      output: its position among the loop's results.
    """

    output: int
    before: Any
    addition: Any


@dataclass(frozen=True)
class AccumulateInLoops(
    Decision, kind="accumulate_in_loops", says="sums that results of loops go into are added up in those loops"
):
    """Sums over microbatches are added up in the loops that make their terms."""

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[AccumulateInLoops]) -> Program:
        replacements: dict[int, Replacement] = {}
        for body in (loop.body for loop in find_loops(program)):
            for eqn in body.eqns:
                sums = _sums(body, eqn) if eqn.primitive.name == "scan" and reduces_gradients(eqn) else []
                if sums:
                    replacements[id(eqn)] = ReadingMore(_adding(sums), tuple(each.before for each in sums))
                for each in sums:
                    made = each.addition.invars.index(eqn.outvars[each.output])
                    replacements[id(each.addition)] = lambda eqn, operands, made=made: [operands[made]]
        return replace_equations(program, mesh, replacements)


def _sums(body, loop) -> list[_Sum]:
    uses = Counter(atom for eqn in body.eqns for atom in variables(eqn.invars))
    uses.update(variables(body.outvars))
    position = body.eqns.index(loop)
    ready = {*body.constvars, *body.invars, *(var for eqn in body.eqns[:position] for var in eqn.outvars)}
    num_carry = Scan(loop).num_carry
    made = {var: index for index, var in enumerate(loop.outvars) if index >= num_carry and uses[var] == 1}
    found = []
    for eqn in body.eqns[position:]:
        mine = [atom for atom in variables(eqn.invars) if atom in made]
        others = [atom for atom in variables(eqn.invars) if atom in ready and uses[atom] == 1]
        if eqn.primitive.name in ADDITIONS and len(mine) == len(others) == 1 and alike(mine[0], others[0]):
            found.append(_Sum(made[mine[0]], others[0], eqn))
    return found


def _adding(sums: list[_Sum]) -> Compute:
    """Runs the loop on the stacks that its outputs are added to."""

    def run(eqn, operands: list) -> list:
        consts, carry, stacks = Scan(eqn).split(operands)

        def step(carry: list, slices: list) -> list:
            mine, before = slices[: len(slices) - len(sums)], slices[len(slices) - len(sums) :]
            made = eval_local(Scan(eqn).closed, [*consts, *carry, *mine])
            for each, value in zip(sums, before, strict=True):
                made[each.output] = value + made[each.output]
            return made

        return rescan(eqn, step, carry, stacks)

    return run
