"""Layer loops: what an iteration could do early, and what could wait until after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import has_side_effects, is_drop_var, new_jaxpr
from jax_deepcompile.analysis.dataflow import alike, needed_for, slim_barriers
from jax_deepcompile.analysis.equal_work import Numbers
from jax_deepcompile.analysis.leading import scan_along_leading_dimension
from jax_deepcompile.analysis.work import is_anchor
from jax_deepcompile.ir.memory import is_fetch, is_offload
from jax_deepcompile.ir.primitives import CONTROL_FLOW, DEVICE_SUMS, PRODUCTS, Scan
from jax_deepcompile.ir.rewrite import renamed, with_renamed_operands, without_barriers
from jax_deepcompile.ir.traversal import free_variables, reached_from, variables

_HEAVY = PRODUCTS | CONTROL_FLOW
"""Work that is never done early with a gather."""


@dataclass(frozen=True)
class Part:
    """A piece of a loop's body."""

    jaxpr: jex.Jaxpr
    inputs: tuple
    outputs: tuple


@dataclass(frozen=True)
class Gradient:
    """The last matrix products, and what follows them, of those that make one value to be reduced and nothing else.

    Attributes:
      part: makes it.
      operands: what the part reads of ``main``; where they wait for something, so do the products.
      outputs: positions, among the stacked outputs, of those that it is reduced for.
    """

    part: Part
    operands: tuple
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class SplitBody:
    """A loop body in pieces that can run in different iterations.

    Attributes:
      early: makes what is gathered of the layer's parameters, or fetched from the host; reads constants and slices,
        never the carry.
      main: all the rest of the work; makes the next carry, the stacked outputs that are not late, and what the pieces
        below read.
      gradients: what is reduced, where it is made for nothing else.
      late: reduces what the pieces above made and finishes outputs that nothing in the loop reads.
      pending: what ``late`` reads of them.
      late_outputs: positions, among the stacked outputs, of those that ``late`` makes.
      in_place: of them, with the variable of the slice, those that alone read a slice like themselves.
    """

    early: Part
    main: Part
    gradients: tuple[Gradient, ...]
    late: Part
    pending: tuple
    late_outputs: tuple[int, ...]
    in_place: tuple[tuple[int, Any], ...]

    @property
    def gathered(self) -> list:
        """What ``early`` gathers, of all that it makes."""
        fetched = {var for eqn in self.early.jaxpr.eqns if is_fetch(eqn) for var in eqn.outvars}
        return [var for var in self.early.outputs if var not in fetched]


def split_body(eqn) -> SplitBody:
    """Splits the body of a ``scan``.

    Before::

        body(c, (w, x)): W = all_gather(w); y = dot(c, W); g = reduce_scatter(dot(x, y)); -> y, g

    After::

        early(w): W = all_gather(w) -> W
        main(c, W): y = dot(c, W) -> y
        gradient(x, y): p = dot(x, y) -> p
        late(p): g = reduce_scatter(p) -> g
    """
    scan = Scan(scan_along_leading_dimension(eqn))
    body, carried = scan.body, set(scan.inputs.carry)
    given = {*body.constvars, *body.invars} - carried
    gathers, early_eqns = _early(body, carried)
    numbers, first = Numbers().of_place(_part(early_eqns, gathers).jaxpr), {}
    for made in (var for each in early_eqns for var in each.outvars):
        first.setdefault(numbers[made], made)
    names = {var: first[numbers[var]] for var in gathers}
    kept = list(dict.fromkeys(names.values()))
    early = _part(needed_for(early_eqns, kept), kept)
    carry, stacked = scan.split_results(renamed(atom, names) for atom in body.outvars)
    rest = [with_renamed_operands(eqn, names) for eqn in body.eqns if not set(eqn.outvars) & set(gathers)]
    late_eqns = _late(rest, carry)
    made_late = {var for eqn in late_eqns for var in eqn.outvars}
    late_outputs = {i: atom for i, atom in enumerate(stacked) if set(variables([atom])) & made_late}
    late = _part(late_eqns, list(late_outputs.values()))
    pending = tuple(var for var in late.inputs if var not in given)
    now = [*carry, *(atom for i, atom in enumerate(stacked) if i not in late_outputs)]
    late_set = {id(eqn) for eqn in late_eqns}
    eqns = slim_barriers([eqn for eqn in rest if id(eqn) not in late_set], [*now, *pending])
    reached = {var: reached_from(late_eqns, {var}) for var in pending}
    reduced_for = {var: tuple(i for i, atom in late_outputs.items() if atom in reached[var]) for var in pending}
    gradients = _gradients(eqns, now, reduced_for, given)
    apart = {id(eqn) for gradient in gradients for eqn in gradient.part.jaxpr.eqns}
    made_apart = {var for gradient in gradients for var in gradient.part.outputs}
    read_later = [*pending, *(var for gradient in gradients for var in gradient.part.inputs if var not in given)]
    read_later = [var for var in dict.fromkeys(read_later) if var not in made_apart]
    main = _part([eqn for eqn in eqns if id(eqn) not in apart], [*now, *read_later])
    read = {*early.inputs, *main.inputs, *(var for gradient in gradients for var in gradient.part.inputs)}
    slices = [var for var in scan.inputs.xs if var not in read]
    in_place = _in_place(late, slices, late_outputs)
    return SplitBody(early, main, gradients, late, pending, tuple(late_outputs), in_place)


def _gradients(eqns: list, now: list, pending: dict[Any, tuple[int, ...]], given: set) -> tuple[Gradient, ...]:
    """Those of ``pending``, values and what they are reduced for, that products make for nobody else."""
    needing = Counter(id(eqn) for eqn in needed_for(eqns, now))
    needing.update(id(eqn) for var in pending for eqn in needed_for(eqns, [var], effects=False))
    found = []
    for var, outputs in pending.items():
        alone = [eqn for eqn in needed_for(eqns, [var], effects=False) if needing[id(eqn)] == 1]
        after = reached_from(alone, {made for eqn in _last_products(alone) for made in eqn.outvars})
        part = _part([eqn for eqn in alone if set(eqn.outvars) & after], [var])
        operands = tuple(atom for atom in part.inputs if atom not in given)
        if var in after and operands:
            found.append(Gradient(part, operands, outputs))
    return tuple(found)


def _last_products(eqns: list) -> list:
    products = [eqn for eqn in eqns if is_anchor(eqn)]
    reads = {atom for eqn in products for atom in variables(eqn.invars)}
    return [eqn for eqn in products if not reached_from(eqns, set(eqn.outvars)) & reads]


def _early(body: jex.Jaxpr, carried: set) -> tuple[list, list]:
    """Results of gathers that do not depend on the carry, and the equations that make them."""
    plain = without_barriers(body)
    late = reached_from(plain.eqns, carried)
    gathers = []
    for eqn in plain.eqns:
        if not _comes_from_elsewhere(eqn) or eqn.outvars[0] in late:
            continue
        before = needed_for([other for other in plain.eqns if not has_side_effects(other)], eqn.outvars)
        if not any(other.primitive.name in _HEAVY for other in before):
            gathers.append(eqn.outvars[0])
    pure = [eqn for eqn in plain.eqns if not has_side_effects(eqn)]
    inner = {atom for eqn in needed_for(pure, gathers) for atom in variables(eqn.invars)}
    others = [eqn for eqn in body.eqns if not _comes_from_elsewhere(eqn) or eqn.outvars[0] not in gathers]
    used = {atom for eqn in others for atom in variables(eqn.invars)}
    final = [var for var in gathers if var not in inner or var in used]
    return final, needed_for(pure, final)


def _comes_from_elsewhere(eqn) -> bool:
    return eqn.primitive.name == "all_gather" or is_fetch(eqn)


def _late(eqns: list, carry_outputs: list) -> list:
    """The reductions and copies to the host that reach stacked outputs only, and everything that reads them."""
    live = {id(eqn) for eqn in needed_for(eqns, carry_outputs)}
    sent = [eqn for eqn in eqns if (eqn.primitive.name in DEVICE_SUMS or is_offload(eqn)) and id(eqn) not in live]
    reached = reached_from(eqns, {var for eqn in sent for var in eqn.outvars if not is_drop_var(var)})
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


def _part(eqns: list, outputs: list) -> Part:
    inputs = free_variables(eqns, outputs)
    return Part(new_jaxpr(inputs, outputs, eqns), tuple(inputs), tuple(outputs))
