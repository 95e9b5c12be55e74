"""Layer loops: what an iteration could do ahead of its turn, and what could wait until after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, has_side_effects, is_drop_var, new_jaxpr, open_jaxpr, scan_counts
from jax_deepcompile.analysis.dataflow import (
    alike,
    free_variables,
    literal_bits,
    needed_for,
    reached_from,
    slim_barriers,
    variables,
    without_barriers,
)
from jax_deepcompile.analysis.gathers import is_gather_loop
from jax_deepcompile.analysis.leading import collectives_along_leading_dimension
from jax_deepcompile.ir.traversal import equations, nested_jaxprs

_HEAVY = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scan", "while", "cond"})
"""Work that is never done ahead of its turn with a gather."""

_REDUCTIONS = frozenset({"reduce_scatter", "psum"})


@dataclass(frozen=True)
class Loop:
    """A ``scan`` of a local program.

    Attributes:
      path: its place: the position of the scan among the scans around it, outermost first.
      eqn: the equation.
    """

    path: tuple[int, ...]
    eqn: Any

    @property
    def name(self) -> str:
        """Such as ``scan.1`` or ``scan.0/scan.2``."""
        return "/".join(f"scan.{position}" for position in self.path)

    @property
    def slices(self) -> list:
        """The variables of the body that are slices of stacks."""
        return open_jaxpr(self.eqn.params["jaxpr"]).invars[sum(scan_counts(self.eqn)) :]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    @property
    def reverse(self) -> bool:
        return self.eqn.params["reverse"]


def find_loops(jaxpr: Any, around: tuple[int, ...] = ()) -> Iterator[Loop]:
    """Every scan that computes, outside of other control flow than scans; inner ones before the ones around them."""
    scans = [eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive.name == "scan" and not is_gather_loop(eqn)]
    for position, eqn in enumerate(scans):
        path = (*around, position)
        for body in nested_jaxprs(eqn):
            yield from find_loops(body, path)
        yield Loop(path, eqn)


def reduces_gradients(eqn) -> bool:
    """Whether a loop reduces onto shards."""
    return any(inner.primitive.name == "reduce_scatter" for inner in equations(eqn.params["jaxpr"]))


@dataclass(frozen=True)
class Part:
    """A piece of a loop's body.

    Attributes:
      jaxpr: computes ``outputs`` from ``inputs``.
      inputs: variables of the body, or made by another piece.
      outputs: atoms of the body.
    """

    jaxpr: jex.Jaxpr
    inputs: tuple
    outputs: tuple


@dataclass(frozen=True)
class SplitBody:
    """A loop body in three pieces that can run in different iterations.

    Attributes:
      early: makes what is gathered of the layer's parameters; reads constants and slices only, never the carry.
      main: all the rest of the work.
      late: reduces what ``main`` made and finishes outputs that nothing in the loop reads.
      late_outputs: positions, among the stacked outputs, of those that ``late`` makes.
      in_place: of them, with the variable of the slice, those that alone read a slice like themselves.
    """

    early: Part
    main: Part
    late: Part
    late_outputs: tuple[int, ...]
    in_place: tuple[tuple[int, Any], ...]


def split_body(eqn) -> SplitBody:
    """Splits the body of a ``scan``.

    Before::

        body(c, (w, x)): W = all_gather(w); y = dot(c, W); g = reduce_scatter(dot(x, y)); -> y, g

    After::

        early(w): W = all_gather(w) -> W
        main(c, x, W): y = dot(c, W); p = dot(x, y) -> y, p
        late(p): g = reduce_scatter(p) -> g
    """
    body = collectives_along_leading_dimension(open_jaxpr(eqn.params["jaxpr"]))
    num_consts, num_carry = scan_counts(eqn)
    carried = set(body.invars[num_consts : num_consts + num_carry])
    gathers, early_eqns = _early(body, carried)
    names = _merge_equal(early_eqns, gathers)
    stacked = body.outvars[num_carry:]
    rest = [eqn for eqn in body.eqns if not set(eqn.outvars) & set(gathers)]
    late_eqns = _late(rest, body.outvars[:num_carry])
    made_late = {var for eqn in late_eqns for var in eqn.outvars}
    late_outputs = tuple(index for index, atom in enumerate(stacked) if isinstance(atom, jex.Var) and atom in made_late)
    late = _part(late_eqns, [stacked[index] for index in late_outputs])
    given = set(body.constvars) | set(body.invars[:num_consts]) | set(body.invars[num_consts + num_carry :])
    pending = [var for var in late.inputs if var not in given]
    now = [atom for index, atom in enumerate(stacked) if index not in late_outputs]
    targets = [*body.outvars[:num_carry], *now, *pending]
    late_set = {id(eqn) for eqn in late_eqns}
    main_eqns = [_renamed(eqn, names) for eqn in rest if id(eqn) not in late_set]
    targets = [names.get(atom, atom) if not isinstance(atom, jex.Literal) else atom for atom in targets]
    main_eqns = slim_barriers(needed_for(main_eqns, targets), targets)
    kept = list(dict.fromkeys(names[var] for var in gathers))
    early = _part(needed_for(early_eqns, kept), kept)
    main = _part(main_eqns, targets)
    read = {*early.inputs, *main.inputs}
    slices = [var for var in body.invars[num_consts + num_carry :] if var not in read]
    in_place = _in_place(late, slices, dict(zip(late_outputs, late.outputs, strict=True)))
    return SplitBody(early, main, late, late_outputs, in_place)


def constants_of(eqn) -> dict:
    """The values of a scan body's own constants."""
    closed = eqn.params["jaxpr"]
    return dict(zip(open_jaxpr(closed).constvars, closed_consts(closed), strict=True))


def _early(body: jex.Jaxpr, carried: set) -> tuple[list, list]:
    """Results of gathers that do not depend on the carry, and the equations that make them."""
    plain = without_barriers(body)
    late = reached_from(plain.eqns, carried)
    gathers = []
    for eqn in plain.eqns:
        if eqn.primitive.name != "all_gather" or eqn.outvars[0] in late:
            continue
        before = needed_for([other for other in plain.eqns if not has_side_effects(other)], eqn.outvars)
        if not any(other.primitive.name in _HEAVY for other in before):
            gathers.append(eqn.outvars[0])
    pure = [eqn for eqn in plain.eqns if not has_side_effects(eqn)]
    inner = {atom for eqn in needed_for(pure, gathers) for atom in variables(eqn.invars)}
    used = {atom for eqn in body.eqns if not _only_early(eqn, inner, gathers) for atom in variables(eqn.invars)}
    final = [var for var in gathers if var not in inner or var in used]
    return final, needed_for(pure, final)


def _only_early(eqn, inner: set, gathers: list) -> bool:
    return eqn.primitive.name == "all_gather" and eqn.outvars[0] in gathers


def _merge_equal(eqns: list, results: list) -> dict:
    """For each of ``results`` the first of them that computes the same."""
    known: dict = {}
    seen: dict = {}

    def read(atom):
        return literal_bits(atom) or known.get(atom, atom)

    for eqn in eqns:
        key = (eqn.primitive.name, str(sorted(eqn.params.items(), key=lambda item: item[0])), *map(read, eqn.invars))
        first = seen.setdefault(key, eqn)
        known.update(zip(eqn.outvars, (known.get(var, var) for var in first.outvars), strict=True))
    return {var: known.get(var, var) for var in results}


def _late(eqns: list, carry_outputs: list) -> list:
    """The reductions that reach stacked outputs only, and everything that reads them."""
    live = {id(eqn) for eqn in needed_for(eqns, carry_outputs)}
    reductions = [eqn for eqn in eqns if eqn.primitive.name in _REDUCTIONS and id(eqn) not in live]
    reached = reached_from(eqns, {var for eqn in reductions for var in eqn.outvars if not is_drop_var(var)})
    return [eqn for eqn in eqns if any(var in reached for var in eqn.outvars)]


def _in_place(late: Part, slices: list, outputs: dict[int, Any]) -> tuple[tuple[int, Any], ...]:
    """Pairs of an output and the one slice that it alone is made of, of the same shape."""
    pairs = []
    for var in slices:
        reached = reached_from(late.jaxpr.eqns, {var})
        made = [index for index, atom in outputs.items() if atom in reached]
        if len(made) == 1 and made[0] not in dict(pairs):
            made_of = outputs[made[0]]
            if made_of is not var and alike(made_of, var):
                pairs.append((made[0], var))
    return tuple(pairs)


def _renamed(eqn, names: dict):
    return eqn.replace(invars=[a if isinstance(a, jex.Literal) else names.get(a, a) for a in eqn.invars])


def _part(eqns: list, outputs: list) -> Part:
    inputs = free_variables(eqns, outputs)
    return Part(new_jaxpr(inputs, outputs, eqns), tuple(inputs), tuple(outputs))
