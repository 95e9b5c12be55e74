"""What a forward loop keeps for the backward loop, computed again instead, as if its layers were checkpointed.

Before::

    s = scan(x, t): h = dot(x, w[t]); y = gelu(h) -> y, h
    scan(g, t): h = s[t]; ...

After::

    s = scan(x, t): h = dot(x, w[t]); y = gelu(h) -> y, x
    scan(g, t): x = s[t]; h = dot(x, w[t]); ...

What of it is better kept, on the device or on the host, other decisions say.

Guarantees: what is computed again is the value that was kept; a layer's input is kept instead, where it was not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import eval_local, new_jaxpr
from jax_deepcompile.analysis.dataflow import needed_for, without_barriers
from jax_deepcompile.analysis.equal_work import is_repeatable
from jax_deepcompile.analysis.loops import Loop, constants_of, find_loops
from jax_deepcompile.analysis.residuals import residuals
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Replacement, compute, replace_equations, rerun, rescan
from jax_deepcompile.transforms.decision import Decision, loops_in_turn, refused


@dataclass(frozen=True)
class Rematerialized(Decision, kind="rematerialize", about=("forward", "backward")):
    """What one loop stacks for another one is computed again there.

    Attributes:
      forward: the loop that makes it.
      backward: a later loop in the same place, over as many layers, that alone reads it.
    """

    forward: str
    backward: str

    def describe(self) -> str:
        return f"{self.backward}: computes again what it reads of {self.forward}, of each layer's input"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[Rematerialized]) -> Program:
        replacements: dict[int, Replacement] = {}
        for each in decisions:
            what = "computes again what is made by", "computes again what is read by"
            forward, backward = loops_in_turn(program, each.forward, each.backward, what)
            again = recomputable(program, forward, backward)
            if again is None:
                raise refused(f"nothing that {each.backward!r} reads of {each.forward!r} can be computed again")
            replacements |= {id(forward.eqn): again.write, id(backward.eqn): again.read}
        return replace_equations(program, mesh, replacements)


@dataclass
class Recomputation:
    """A loop that is rewritten to compute again what another one made, while both are traced.

    Attributes:
      eqns: of the forward body: those that make what is computed again.
      made: the variable of the forward body by position among the stacked inputs of the backward loop.
      dropped: positions among the stacked outputs of the forward loop that nobody reads then.
      carried: the variables of the forward body's carry that ``eqns`` read.
      names: what the forward loop's residuals are called.
    """

    forward: Any
    eqns: list
    made: Mapping[int, Any]
    dropped: frozenset[int]
    carried: list
    names: tuple[str, ...]
    given: dict = field(default_factory=dict)
    stacks: list = field(default_factory=list)

    def write(self, eqn: Any, operands: list) -> list:
        scan = Scan(eqn)
        body, outputs = scan.body, scan.outputs
        consts, _, stacks = scan.split(operands)
        self.given = constants_of(eqn) | dict(zip(scan.inputs.consts, consts, strict=True))
        kept = [atom for place, atom in enumerate(outputs.ys) if place not in self.dropped]
        inner = new_jaxpr([*body.constvars, *body.invars], [*outputs.carry, *kept, *self.carried], body.eqns)
        made = scan.split_results(rerun(eqn, inner, operands))
        self.stacks = [*stacks, *made.ys[len(kept) :]]
        rest = iter(made.ys)
        nobody = [lax.empty(var.aval.shape, var.aval.dtype) for var in scan.results.ys]
        ys = [nobody[place] if place in self.dropped else next(rest) for place in range(len(nobody))]
        return [*made.carry, *ys]

    def read(self, eqn: Any, operands: list) -> list:
        scan, ahead = Scan(eqn), Scan(self.forward)
        consts, carry, stacks = scan.split(operands)

        def body(carry: list, slices: list) -> list:
            own, more = slices[: len(stacks)], slices[len(stacks) :]
            known = self.given | dict(zip([*ahead.inputs.xs, *self.carried], more, strict=True))
            known = compute(self.eqns, known)
            here = [known[self.made[place]] if place in self.made else value for place, value in enumerate(own)]
            return eval_local(scan.closed, [*consts, *carry, *here])

        return rescan(eqn, body, carry, [*stacks, *self.stacks])


def recomputable(program: Program, forward: Loop, backward: Loop) -> Recomputation | None:
    """How ``backward``, which comes later in the same place, computes what only it reads of ``forward``; None if that
    makes nothing of a layer's input."""
    around = {loop.path: loop.scan.closed for loop in find_loops(program)} | {(): program.jaxpr}
    found = residuals(around[forward.path[:-1]], forward, backward)
    scan = Scan(forward.eqn)
    body = without_barriers(scan.body)
    atoms = scan.split_results(body.outvars).ys
    given = {*body.constvars, *body.invars}
    wanted = [each for each in found if atoms[each.output] not in given]
    eqns = needed_for(body.eqns, [atoms[each.output] for each in wanted], effects=False)
    if not wanted or not all(map(is_repeatable, eqns)):
        return None
    reads = {atom for eqn in eqns for atom in eqn.invars if isinstance(atom, jex.Var)}
    carried = [var for var in scan.inputs.carry if var in reads]
    made = {place: atoms[each.output] for each in wanted for place in each.inputs}
    dropped = frozenset(each.output for each in wanted)
    return Recomputation(forward.eqn, eqns, made, dropped, carried, tuple(each.name for each in wanted))
