"""Parameters that a loop gathers alike in every iteration, gathered once before it.

Before, in a loop over microbatches::

    scan(batch): W = all_gather(w); ...

After::

    W = all_gather(w); scan(batch): ... W ...

Guarantees: values are bitwise the same; nothing is gathered more often; what is kept lives until the loop ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from jax_deepcompile._jax_compat import closed_consts, eval_local, new_jaxpr
from jax_deepcompile.analysis.dataflow import given
from jax_deepcompile.analysis.gathers import by_value, hoistable_gathers, slicer
from jax_deepcompile.analysis.loops import Loop, constants_of
from jax_deepcompile.analysis.names import gather_names
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import replace_equations, rescan
from jax_deepcompile.ir.traversal import free_variables
from jax_deepcompile.transforms.decision import Decision, loop_named, positions


@dataclass(frozen=True)
class KeptGathers(Decision, kind="keep_gathered", about=("loop",)):
    """What one loop gathers once, before it starts, instead of in every iteration.

    Attributes:
      gathers: of what is the same every iteration, in its forward and its backward part.
    """

    loop: str
    gathers: tuple[str, ...]

    def describe(self) -> str:
        return f"{self.loop}: gathers {', '.join(self.gathers)} once"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[KeptGathers]) -> Program:
        """Loops around others first: what those keep is gathered in every iteration of what they are in."""
        depths = [len(loop_named(program, each.loop, "keeps gathers over").path) for each in decisions]
        for depth in sorted(set(depths)):
            hoisting = {}
            for each in (each for each, own in zip(decisions, depths, strict=True) if own == depth):
                loop = loop_named(program, each.loop, "keeps gathers over")
                what = f"keeps over {each.loop!r} the gather of"
                if kept := positions(each.gathers, hoistable_names(program, loop), what):
                    hoisting[id(loop.eqn)] = partial(_hoist, kept=kept)
            program = replace_equations(program, mesh, hoisting)
        return program


def hoistable_names(program: Program, loop: Loop) -> list[str]:
    """What ``hoistable_gathers`` of ``loop`` are called."""
    return gather_names(program, loop.path, hoistable_gathers(loop.eqn))


def _hoist(eqn, operands: list, kept: Collection[int]) -> list:
    scan = Scan(eqn)
    own_consts, carry, stacks = scan.split(operands)
    gathers = [gather for index, gather in enumerate(hoistable_gathers(eqn)) if index in kept]
    known = constants_of(eqn) | dict(zip(scan.inputs.consts, own_consts, strict=True))
    values = [[gather.result for gather in same] for same in by_value(gathers)]
    first = [results[0] for results in values]
    ahead = slicer(scan.body)(first)
    inputs = free_variables(ahead, first)
    gathered = eval_local(new_jaxpr(inputs, first, ahead), [known[var] for var in inputs])
    inner, consts = given(scan.body, values), [*closed_consts(scan.closed), *own_consts]
    return rescan(eqn, lambda carry, slices: eval_local(inner, [*consts, *carry, *slices, *gathered]), carry, stacks)
