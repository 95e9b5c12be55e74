"""What a forward loop keeps for the backward loop, computed again instead, as if its layers were checkpointed.

Before::

    s = scan(x, t): h = dot(x, w[t]); y = gelu(h) -> y, h
    scan(g, t): h = s[t]; ...

After::

    s = scan(x, t): h = dot(x, w[t]); y = gelu(h) -> y, x
    scan(g, t): x = s[t]; h = dot(x, w[t]); ...

What both loops read of a stack, and what the backward loop computes of it anyway, such as gathered parameters, is there
once. What of it is better kept, on the device or on the host, other decisions say. Loops inside of the forward loop run
again too, as ``layers @recomputed``, and what those keep may be computed again likewise.

Guarantees: what is computed again is the value that was kept; a layer's input is kept instead, where it was not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import bind, dce, new_jaxpr
from jax_deepcompile.analysis.dataflow import literal_bits, needed_for
from jax_deepcompile.analysis.equal_work import is_repeatable, work_key
from jax_deepcompile.analysis.loops import Loop, constants_of, find_loops
from jax_deepcompile.analysis.names import value_names, with_recomputed_loops
from jax_deepcompile.analysis.residuals import residuals
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, read, rerun, rescan
from jax_deepcompile.ir.rewrite import without_barriers
from jax_deepcompile.transforms.decision import Decision, refused, replace_pairs


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
        what, left = ("computes again what is made by", "computes again what is read by"), list(decisions)
        while left:
            known = {loop.name for loop in find_loops(program)}
            now = [each for each in left if {each.forward, each.backward} <= known] or left
            program = with_recomputed_loops(replace_pairs(program, mesh, now, what, _bridge), program)
            left = [each for each in left if each not in now]
        return program


def _bridge(program: Program, forward: Loop, backward: Loop, choice: Rematerialized) -> tuple[Compute, Compute]:
    again = recomputable(program, forward, backward)
    if again is None:
        raise refused(f"nothing that {choice.backward!r} reads of {choice.forward!r} can be computed again")
    return again.write, again.read


@dataclass
class Recomputation:
    """A loop that is rewritten to compute again what another one made, while both are traced.

    Attributes:
      eqns: of the forward body: those that make what is computed again.
      made: the variable of the forward body by position among the stacked inputs of the backward loop.
      dropped: positions among the stacked outputs of the forward loop that nobody reads then.
      carried: the variables of the forward body's carry that ``eqns`` read.
      body: what is left of the forward body.
      places: of what that stacks, among its stacked outputs.
      names: what is computed again and ``body`` has too, as it is called there.
    """

    forward: Any
    eqns: list
    made: Mapping[int, Any]
    dropped: frozenset[int]
    carried: list
    body: Any
    places: Mapping[Any, int]
    names: tuple[str, ...]
    given: dict = field(default_factory=dict)
    stacks: list = field(default_factory=list)

    def write(self, eqn: Any, operands: list) -> list:
        scan = Scan(eqn)
        consts, _, stacks = scan.split(operands)
        self.given = constants_of(eqn) | dict(zip(scan.inputs.consts, consts, strict=True))
        made = scan.split_results(rerun(eqn, self.body, operands))
        self.stacks = [*stacks, *(made.ys[self.places[var]] for var in self.carried)]
        rest = iter(made.ys)
        ys = [
            lax.empty(var.aval.shape, var.aval.dtype) if place in self.dropped else next(rest)
            for place, var in enumerate(scan.results.ys)
        ]
        return [*made.carry, *ys]

    def read(self, eqn: Any, operands: list) -> list:
        scan, given = Scan(eqn), [*Scan(self.forward).inputs.xs, *self.carried]
        consts, carry, stacks = scan.split(operands)
        pairs = enumerate(zip(scan.inputs.xs, stacks, strict=True))
        own = {var: stack for place, (var, stack) in pairs if place not in self.made}
        read_once = {id(stack): stack for stack in (*own.values(), *self.stacks)}
        constants = self.given | constants_of(eqn) | dict(zip(scan.inputs.consts, consts, strict=True))

        def body(carry: list, slices: list) -> list:
            layer = dict(zip(read_once, slices, strict=True))
            known = constants | dict(zip(scan.inputs.carry, carry, strict=True))
            known |= {var: layer[id(stack)] for var, stack in own.items()}
            known |= {var: layer[id(stack)] for var, stack in zip(given, self.stacks, strict=True)}
            once = _Once()
            known = once.compute(self.eqns, known)
            known |= {scan.inputs.xs[place]: known[atom] for place, atom in self.made.items()}
            known = once.compute(scan.body.eqns, known)
            return [read(atom, known) for atom in scan.body.outvars]

        return rescan(eqn, body, carry, list(read_once.values()))


@dataclass
class _Once:
    """Computes equations, traced here and now, but for what it computed of the same values before.

    Attributes:
      made: results of repeatable equations, by what is done to what.
      guarded: for results of barriers the values that went into them.
    """

    made: dict = field(default_factory=dict)
    guarded: dict[int, Any] = field(default_factory=dict)

    def compute(self, eqns: Sequence, known: Mapping[Any, Any]) -> dict:
        """``known``, the values of some variables, and with them what ``eqns`` define."""
        known = dict(known)
        for eqn in eqns:
            operands = [read(atom, known) for atom in eqn.invars]
            before = [
                literal_bits(atom) or id(self._before(value)) for atom, value in zip(eqn.invars, operands, strict=True)
            ]
            key = (work_key(eqn), tuple(before))
            results = self.made.get(key) or bind(eqn, operands)
            if eqn.primitive.name == "optimization_barrier":
                self.guarded |= {
                    id(result): self._before(value) for result, value in zip(results, operands, strict=True)
                }
            elif is_repeatable(eqn):
                self.made[key] = results
            known.update(zip(eqn.outvars, results, strict=True))
        return known

    def _before(self, value: Any) -> Any:
        return self.guarded.get(id(value), value)


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
    kept = [place for place in range(len(atoms)) if place not in dropped]
    places = {atoms[place]: at for at, place in enumerate(kept) if isinstance(atoms[place], jex.Var)}
    more = [var for var in carried if var not in places]
    places |= {var: len(kept) + at for at, var in enumerate(more)}
    results = [*scan.outputs.carry, *(scan.outputs.ys[place] for place in kept), *more]
    left = dce(new_jaxpr([*scan.body.constvars, *scan.body.invars], results, scan.body.eqns))
    known = value_names(left)
    names = tuple(known[var] for var in dict.fromkeys(made.values()) if var in known)
    return Recomputation(forward.eqn, eqns, made, dropped, carried, left, places, names)
