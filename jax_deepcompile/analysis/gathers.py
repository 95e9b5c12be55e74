"""What is gathered, from where, and how often the same thing is gathered again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import has_side_effects, open_jaxpr
from jax_deepcompile.analysis.dataflow import literal_bits
from jax_deepcompile.analysis.equal_work import work_key
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import CHEAP, ELEMENTWISE, Scan
from jax_deepcompile.ir.rewrite import without_barriers
from jax_deepcompile.ir.traversal import variables


@dataclass(frozen=True)
class Gather:
    """One all-gather of something that was only sliced, cast, reshaped or scaled since it came in.

    Attributes:
      sources: the inputs it is made of: one, or several that elementwise work joins, such as
        integers and their scales; the largest first.
      key: equal for gathers of the same value.
      size_bytes: of the whole value.
      position: of its equation in the jaxpr.
      result: the variable it defines.
    """

    sources: tuple
    key: tuple
    size_bytes: int
    position: int
    result: Any


def find_gathers(jaxpr: Any, sources: Sequence) -> tuple[Gather, ...]:
    """The all-gathers of values that derive cheaply from ``sources`` alone, loops aside, in program order."""
    flat = open_jaxpr(jaxpr)
    origins = {var: (var,) for var in sources}
    keys: dict = {var: (index,) for index, var in enumerate(sources)}
    positions = {eqn.outvars[0]: index for index, eqn in enumerate(flat.eqns) if eqn.outvars}
    found = []
    for eqn in without_barriers(flat).eqns:
        operands = sorted(dict.fromkeys(variables(eqn.invars)), key=size_bytes, reverse=True)
        gathers = is_gather_loop(eqn)
        cheap = CHEAP if len(operands) == 1 else ELEMENTWISE
        if (
            not operands
            or not (gathers or eqn.primitive.name in cheap)
            or any(atom not in origins for atom in operands)
        ):
            continue
        var = eqn.outvars[0]
        origins[var] = tuple(dict.fromkeys(source for atom in operands for source in origins[atom]))
        literals = tuple(map(literal_bits, eqn.invars))
        others = tuple(keys.get(atom) for atom in variables(eqn.invars)) if len(operands) > 1 else ()
        keys[var] = (*keys[operands[0]], *others, work_key(eqn), literals)
        if gathers or eqn.primitive.name == "all_gather":
            found.append(Gather(origins[var], keys[var], size_bytes(var), positions[var], var))
    return tuple(found)


def derived(jaxpr: Any, known: dict) -> dict:
    """What is ``known`` of some variables, and so of all that is made by cheap work of one of those alone."""
    known = dict(known)
    for eqn in open_jaxpr(jaxpr).eqns:
        operands = variables(eqn.invars)
        if eqn.primitive.name == "optimization_barrier":
            pairs = zip(eqn.outvars, eqn.invars, strict=True)
            known |= {var: known[atom] for var, atom in pairs if atom in operands and atom in known}
        elif eqn.primitive.name in CHEAP or is_gather_loop(eqn):
            known |= {var: known[operands[0]] for var in eqn.outvars if len(operands) == 1 and operands[0] in known}
    return known


def is_gather_loop(eqn) -> bool:
    """Whether ``eqn`` is a scan that only gathers the slices of one stack, each by itself."""
    if eqn.primitive.name != "scan" or len(eqn.outvars) != 1:
        return False
    scan = Scan(eqn)
    inner = {each.primitive.name for each in scan.body.eqns}
    return not scan.num_consts and not scan.num_carry and "all_gather" in inner and inner <= CHEAP


def outermost(gathers: Sequence[Gather]) -> tuple[Gather, ...]:
    """Without the gathers that only feed another one, as those within a node feed those across nodes."""
    longer = {gather.key[:count] for gather in gathers for count in range(1, len(gather.key))}
    return tuple(gather for gather in gathers if gather.key not in longer)


def by_value(gathers: Iterable[Gather]) -> tuple[tuple[Gather, ...], ...]:
    """``gathers``, those of the same value together."""
    groups: dict[tuple, list[Gather]] = {}
    for gather in gathers:
        groups.setdefault(gather.key, []).append(gather)
    return tuple(map(tuple, groups.values()))


def hoistable_gathers(eqn) -> tuple[Gather, ...]:
    """The gathers in a scan's body that are the same in every iteration."""
    return outermost(find_gathers(Scan(eqn).body, Scan(eqn).inputs.consts))


def slicer(jaxpr: Any) -> Callable[[Sequence], list]:
    """What tells the equations of ``jaxpr`` that make some targets, barriers left out."""
    eqns = [eqn for eqn in without_barriers(open_jaxpr(jaxpr)).eqns if not has_side_effects(eqn)]
    makers = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}

    def slice_for(targets: Sequence) -> list:
        found: set[int] = set()
        waiting = variables(targets)
        while waiting:
            place = makers.get(waiting.pop())
            if place is not None and place not in found:
                found.add(place)
                waiting += variables(eqns[place].invars)
        return [eqns[place] for place in sorted(found)]

    return slice_for


def first_uses(jaxpr: Any, values: Sequence) -> list[int]:
    """Position of the first equation that reads each of ``values``; past the last one where none does."""
    eqns = open_jaxpr(jaxpr).eqns
    first: dict = {}
    for index, eqn in enumerate(eqns):
        for atom in variables(eqn.invars):
            first.setdefault(atom, index)
    return [first.get(value, len(eqns)) for value in values]
