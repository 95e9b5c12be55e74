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

from jax_deepcompile._jax_compat import closed_consts, eval_local, new_jaxpr
from jax_deepcompile.analysis.dataflow import free_variables, slim_barriers
from jax_deepcompile.analysis.gathers import hoistable_gathers, slice_of
from jax_deepcompile.analysis.loops import Loop, constants_of, find_loops
from jax_deepcompile.analysis.names import gather_names
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import replace_equations, rescan
from jax_deepcompile.ir.rewrite import with_renamed_operands
from jax_deepcompile.transforms.decision import Decision, loop_named, positions


@dataclass(frozen=True)
class KeptGathers(Decision, kind="keep_gathered"):
    """What one loop gathers once, before it starts, instead of in every iteration.

    Attributes:
      loop: the loop.
      gathers: of what is the same every iteration, in its forward and its backward part.
    """

    loop: str
    gathers: tuple[str, ...]

    def subjects(self) -> tuple[str, ...]:
        return (self.loop,)

    def check(self, program: Program) -> None:
        _positions(program, self)

    def describe(self) -> str:
        return f"{self.loop}: gathers {', '.join(self.gathers)} once"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[KeptGathers]) -> Program:
        wanted = {each.loop: _positions(program, each) for each in decisions if each.gathers}
        chosen = {id(loop.eqn): wanted[loop.name] for loop in find_loops(program) if loop.name in wanted}

        def hoisted(eqn, operands: list) -> list:
            return _hoist(eqn, operands, chosen[id(eqn)])

        return replace_equations(program, mesh, dict.fromkeys(chosen, hoisted)) if chosen else program


def hoistable_names(program: Program, loop: Loop) -> list[str]:
    """What ``hoistable_gathers`` of ``loop`` are called."""
    return gather_names(program, loop.path, hoistable_gathers(loop.eqn))


def _positions(program: Program, choice: KeptGathers) -> list[int]:
    loop = loop_named(program, choice.loop, "keeps gathers over")
    return positions(choice.gathers, hoistable_names(program, loop), f"keeps over {choice.loop!r} the gather of")


def _hoist(eqn, operands: list, kept: Collection[int]) -> list:
    body = Scan(eqn).body
    consts, carry, stacks = Scan(eqn).split(operands)
    gathers = [gather for index, gather in enumerate(hoistable_gathers(eqn)) if index in kept]
    given = constants_of(eqn) | dict(zip(Scan(eqn).inputs.consts, consts, strict=True))
    first = {gather.key: gather.result for gather in reversed(gathers)}
    results = list(first.values())
    ahead = slice_of(body, results)
    inputs = free_variables(ahead, results)
    early = new_jaxpr(inputs, results, ahead)
    values = eval_local(early, [given[var] for var in inputs])
    known = {gather.result: first[gather.key] for gather in gathers}
    rest = [with_renamed_operands(other, known) for other in body.eqns if not set(other.outvars) & set(known)]
    rest = slim_barriers(rest, body.outvars)
    inner = new_jaxpr([*body.constvars, *results, *body.invars], body.outvars, rest)
    consts = [*closed_consts(Scan(eqn).closed), *values, *consts]
    return rescan(eqn, lambda carry, slices: eval_local(inner, [*consts, *carry, *slices]), carry, stacks)
