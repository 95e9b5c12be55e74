"""What forward leaves for backward where no loop runs the layers, in the host's memory meanwhile.

Before::

    x1 = f(x); x2 = g(x1); x3 = h(x2)
    ... x3 ...; ... x2 ...; ... x1 ...

After, two copies in flight::

    x1 = f(x); h1 = to_host(x1); x2 = g(x1); h2 = to_host(x2); x3 = barrier(h(x2), h1); h3 = to_host(x3)
    ... to_device(h3) ...; d = ... to_device(h2) ...; x1' = to_device(barrier(h1, d)); ... x1' ...

Copies out would otherwise all end with the forward pass, whose values stay until then; copies back would all begin
there.

Guarantees: values are bitwise the same; each is copied out once and back once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import lax

from jax_deepcompile._jax_compat import bind, open_jaxpr
from jax_deepcompile.analysis.names import value_names
from jax_deepcompile.analysis.segments import Tape
from jax_deepcompile.analysis.work import is_anchor
from jax_deepcompile.ir.memory import DEVICE, HOST
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, replace_equations
from jax_deepcompile.ir.rewrite import renamed
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.transforms.decision import Decision, listed, loop_named, positions


@dataclass(frozen=True)
class OffloadedValues(
    Decision,
    kind="offload_values",
    after=("rematerialize_segments", "keep_activations"),
    about=("where",),
    on_host=True,
):
    """What forward leaves for backward is in the host's memory between them.

    Attributes:
      where: the loop whose iterations have forward and backward, as those over microbatches do; empty for what is
        outside of loops.
      values: by the scope that computes them.
    """

    where: str
    values: tuple[str, ...]

    def describe(self) -> str:
        where = self.where or "outside of loops"
        return f"{where}: copies {listed(self.values, self.where)} to the host for backward"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[OffloadedValues]) -> Program:
        ways: dict[int, Compute] = {}
        for each in decisions:
            what = "copies to the host what is made by"
            jaxpr = loop_named(program, each.where, what).scan.closed if each.where else program.jaxpr
            tape = Tape(open_jaxpr(jaxpr))
            known = offloadable(tape, phased=not each.where)
            where = repr(each.where) if each.where else "code outside of loops"
            places = positions(each.values, list(known), f"copies to the host, from {where},")
            ways |= _copying(tape, [list(known.values())[place] for place in places])
        return replace_equations(program, mesh, ways)


def offloadable(tape: Tape, phased: bool) -> dict[str, Any]:
    """What forward leaves for backward, by name."""
    names = value_names(tape.jaxpr, phased)
    return {names[var]: var for var in tape.left if var in names}


_IN_FLIGHT = 2
"""Values on their way at a time, each way."""


def _copying(tape: Tape, values: Sequence) -> dict[int, Compute]:
    """How the equations run that make ``values``, that backward waits for, and that read them there."""
    eqns, copies = tape.jaxpr.eqns, _Copies(tape.guarded_forward)
    makers = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
    values = sorted(values, key=makers.__getitem__)
    roles: defaultdict[int, _Role] = defaultdict(_Role)
    for at, var in enumerate(values):
        before = values[at - _IN_FLIGHT] if at >= _IN_FLIGHT else None
        roles[makers[var]].made.append((var, before))
    readers: dict[Any, list[int]] = {var: [] for var in values}
    for place in tape.readers:
        for atom in dict.fromkeys(renamed(atom, tape.guarded_forward) for atom in variables(eqns[place].invars)):
            if atom in readers:
                readers[atom].append(place)
    back = sorted(values, key=lambda var: readers[var][0])
    marks = [place for place in tape.readers if is_anchor(eqns[place])]
    for at, var in enumerate(back):
        first = readers[var][0]
        behind = readers[back[at - _IN_FLIGHT]][0] if at >= _IN_FLIGHT else 0
        behind = max(behind, makers[var] + 1)
        after = next((place for place in marks if behind <= place < first), None)
        if after is not None:
            roles[after].fetched.append(var)
        for place in readers[var]:
            roles[place].read.append(var)
    return {id(eqns[place]): partial(copies.run, role) for place, role in roles.items()}


@dataclass
class _Role:
    """What an equation has to do with copies.

    Attributes:
      made: what it makes that goes to the host, each with what has to be there before it does, if anything.
      fetched: what is on its way back once it has run.
      read: what it reads that comes from the host.
    """

    made: list[tuple[Any, Any]] = field(default_factory=list)
    fetched: list = field(default_factory=list)
    read: list = field(default_factory=list)


@dataclass
class _Copies:
    """Values that are on the host, or were, while both passes are traced.

    Attributes:
      guarded: for results of forward's barriers what went into them.
      there: what is on the host.
      back: what has come from there.
    """

    guarded: dict
    there: dict = field(default_factory=dict)
    back: dict = field(default_factory=dict)

    def run(self, role: _Role, eqn: Any, operands: list) -> list:
        for var in role.read:
            if var not in self.back:
                self.back[var] = jax.device_put(self.there[var], DEVICE)
        sources = [renamed(atom, self.guarded) for atom in eqn.invars]
        operands = [
            self.back[source] if source in role.read else operand
            for source, operand in zip(sources, operands, strict=True)
        ]
        results = list(bind(eqn, operands))
        for var, before in role.made:
            place = eqn.outvars.index(var)
            if before is not None:
                results[place], self.there[before] = lax.optimization_barrier((results[place], self.there[before]))
            self.there[var] = jax.device_put(results[place], HOST)
        for var in role.fetched:
            there, results[0] = lax.optimization_barrier((self.there[var], results[0]))
            self.back[var] = jax.device_put(there, DEVICE)
        return results
