"""Where the inputs of a program are gathered, as it runs: in which of its loops, or outside of them.

An input is followed through what a plan makes of its gathers: joined with others, cut out of stacks by index, run ahead
of a loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import paired, variables
from jax_deepcompile.analysis.gathers import is_gather_loop
from jax_deepcompile.analysis.loops import Path, computing_scans
from jax_deepcompile.analysis.names import phase
from jax_deepcompile.ir.primitives import CHEAP, SLICES, Scan, While, called
from jax_deepcompile.ir.program import Program

Origins: TypeAlias = frozenset[tuple[int, bool]]
"""Inputs, by position, and whether only a part of each is left."""

_UNNAMED = (-1,)
"""The path of loops in others than scans, which have no names."""


def gathered_in(program: Program, before: Program | None = None) -> dict[int, list[str]]:
    """For inputs of ``program`` the loops in which they are gathered, in words, by the positions of the inputs.

    Iterations that run apart from their loop count as the loop's. Loops that lost their names are called as those that
    gathered the input in ``before``, of which ``program`` was made.
    """
    named = _places(before) if before is not None and before is not program else {}
    return {index: _words(places, named.get(index, ())) for index, places in _places(program).items()}


@dataclass(frozen=True)
class _Place:
    """``loops``: those around a gather, by name; ``is_part``: whether what is gathered is cut out of the input."""

    loops: tuple[str, ...]
    phase: str
    is_part: bool

    def is_of_another(self, places: Sequence[_Place]) -> bool:
        """Whether it is that of an iteration which runs apart from a loop beside it."""
        depth = len(self.loops)
        return self.is_part and any(len(each.loops) > depth and each.loops[:depth] == self.loops for each in places)

    def names(self, before: Sequence[_Place]) -> list[str]:
        if not self.loops:
            return [f"outside of loops{self.phase}"]
        if self.loops[-1]:
            return [self.loops[-1]]
        depth = len(self.loops)
        return [each.loops[depth - 1] for each in before if len(each.loops) >= depth] or ["a loop"]


def _words(places: Sequence[_Place], before: Sequence[_Place]) -> list[str]:
    found = [name for place in places if not place.is_of_another(places) for name in place.names(before)]
    return list(dict.fromkeys(found))


def _places(program: Program) -> Mapping[int, list[_Place]]:
    """For each input where it is gathered."""
    jaxpr, walk = open_jaxpr(program.jaxpr), _Walk(program)
    walk.visit(jaxpr, {var: frozenset([(index, False)]) for index, var in enumerate(jaxpr.invars)}, (), ())
    return dict(sorted(walk.places.items()))


@dataclass
class _Walk:
    program: Program
    places: defaultdict[int, list[_Place]] = field(default_factory=lambda: defaultdict(list))

    def visit(self, jaxpr: Any, given: Mapping[Any, Origins], path: Path, loops: tuple[str, ...]) -> None:
        known, numbers = dict(given), {id(eqn): number for number, eqn in enumerate(computing_scans(jaxpr))}
        for eqn in jaxpr.eqns:
            if id(eqn) in numbers:
                inside = (*path, numbers[id(eqn)])
                around = (*loops, self.program.loop_names.get(inside, ""))
                self.visit(Scan(eqn).body, dict(paired(Scan(eqn).body.invars, eqn.invars, known)), inside, around)
            elif eqn.primitive.name == "while":
                body, read = While(eqn).body, eqn.invars[While(eqn).num_cond_consts :]
                self.visit(body, dict(paired(body.invars, read, known)), _UNNAMED, (*loops, ""))
            else:
                made = _origins(eqn, known)
                known |= made
                if eqn.primitive.name == "all_gather" or is_gather_loop(eqn):
                    for index, is_part in frozenset().union(*made.values()):
                        self.places[index].append(_Place(loops, phase(eqn), is_part))


def _origins(eqn: Any, known: Mapping[Any, Origins]) -> dict[Any, Origins]:
    """What results of ``eqn`` are cheaply made of, where that is of known values alone."""
    name, operands = eqn.primitive.name, variables(eqn.invars)
    if name == "optimization_barrier":
        return dict(paired(eqn.outvars, eqn.invars, known))
    if (body := called(eqn)) is not None:
        inner = open_jaxpr(body)
        inside = dict(paired(inner.invars, eqn.invars, known))
        for each in inner.eqns:
            inside |= _origins(each, inside)
        return dict(paired(eqn.outvars, inner.outvars, inside))
    read = operands[:1] if name in SLICES else operands  # the others say where it is cut
    if not (name in _PASSED_ON or is_gather_loop(eqn)) or not read or any(atom not in known for atom in read):
        return {}
    origins = frozenset().union(*(known[atom] for atom in read))
    if name in SLICES:
        origins = frozenset((index, True) for index, _ in origins)
    return dict.fromkeys(eqn.outvars, origins)


_PASSED_ON = CHEAP | SLICES | {"concatenate", "device_put"}
