"""What the kernels of a local program read and write: chains of equations that XLA fuses run as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_deepcompile._jax_compat import is_drop_var, open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.work import fused_away, fuses
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import COLLECTIVES, PRODUCTS, RECOMPUTED, SLICES, UPDATES, VIEWS


@dataclass(frozen=True)
class Kernels:
    """The kernels of one jaxpr, loops, calls, collectives and matrix products aside.

    Attributes:
      moved_bytes: what the kernel that ends with each equation reads and writes; 0 where none ends.
      sources: for each value that is never written: what is read, and how many bytes of it, instead.
    """

    moved_bytes: tuple[int, ...]
    sources: Mapping[Any, Mapping[Any, int]]


def kernels_of(jaxpr: Any) -> Kernels:
    """The kernels of a jaxpr.

    A chain in which each equation alone reads the one before is one kernel: what it reads and its last result are in
    memory, the rest is not. Views are never written, nor is what costs less to compute wherever it is read; a cast
    for a collective counts with the collective.
    """
    finder = _Finder(open_jaxpr(jaxpr))
    return Kernels(tuple(finder.moved_bytes(eqn) for eqn in finder.jaxpr.eqns), finder.sources)


def between_products(jaxpr: Any, values: Iterable[Any]) -> frozenset[Any]:
    """Of ``values`` those that no kernel may leave unwritten: what products make or read, and what is read after a
    product that it leads to."""
    eqns = open_jaxpr(jaxpr).eqns
    made, read = set[Any](), set[Any]()
    for eqn in eqns:
        if eqn.primitive.name in PRODUCTS or (_renames(eqn) and not made.isdisjoint(variables(eqn.invars))):
            made.update(eqn.outvars)
    for eqn in reversed(eqns):
        if eqn.primitive.name in PRODUCTS or (_renames(eqn) and not read.isdisjoint(eqn.outvars)):
            read.update(variables(eqn.invars))
    return frozenset(each for each in values if each in made or each in read or _is_read_beyond(eqns, each))


def _renames(eqn: Any) -> bool:
    return eqn.primitive.name in VIEWS or eqn.primitive.name == "name"


def _is_read_beyond(eqns: Sequence[Any], value: Any) -> bool:
    """Whether an equation reads it and what comes of a product that it leads to."""
    reached, beyond = {value}, set[Any]()
    for eqn in eqns:
        operands = variables(eqn.invars)
        if not beyond.isdisjoint(operands):
            if value in operands:
                return True
            beyond.update(eqn.outvars)
        elif not reached.isdisjoint(operands):
            (beyond if eqn.primitive.name in PRODUCTS else reached).update(eqn.outvars)
    return False


@dataclass
class _Finder:
    """Walks a jaxpr in order.

    Attributes:
      unwritten: of those values the ones that are no views: a kernel must end before anything but a kernel reads them.
    """

    jaxpr: Any
    sources: dict = field(default_factory=dict)
    unwritten: set = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chained = fused_away(self.jaxpr)
        self.must_be_written = set(variables(self.jaxpr.outvars))
        for eqn in self.jaxpr.eqns:
            if not fuses(eqn) and eqn.primitive.name not in COLLECTIVES:
                self.must_be_written.update(variables(eqn.invars))

    def moved_bytes(self, eqn: Any) -> int:
        if not fuses(eqn) and eqn.primitive.name not in VIEWS:
            return 0
        read, written = {}, 0
        for out, operands in _results(eqn):
            sources = self._read(eqn, out, operands)
            computed = self.unwritten.intersection(operands)
            if eqn.primitive.name in VIEWS and not computed:
                self.sources[out] = sources
            elif out in self.chained or self._is_computed_where_read(eqn, out):
                self.sources[out] = sources
                self.unwritten.add(out)
            else:
                read |= sources
                written += self._written(eqn, out)
        return sum(read.values()) + written

    def _is_computed_where_read(self, eqn: Any, out: Any) -> bool:
        if eqn.primitive.name not in RECOMPUTED or out in self.must_be_written:
            return False
        return not any(var in self.chained for var in variables(eqn.invars))

    def _read(self, eqn: Any, out: Any, operands: list) -> dict:
        """What a kernel reads in memory to compute ``out``."""
        read: dict = {}
        for place, var in enumerate(operands):
            size = size_bytes(var)
            if place == 0 and (eqn.primitive.name in SLICES or eqn.primitive.name == "gather"):
                size = min(size, size_bytes(out))
            elif place == 0 and eqn.primitive.name in UPDATES and var not in self.unwritten:
                size = 0
            for source, most in self.sources.get(var, {var: size}).items():
                read[source] = max(read.get(source, 0), min(most, size) if var not in self.unwritten else most)
        return read

    def _written(self, eqn: Any, out: Any) -> int:
        """Bytes written for ``out``: where it takes the place of an operand, those updated."""
        if eqn.primitive.name not in UPDATES or self.unwritten.intersection(variables(eqn.invars[:1])):
            return size_bytes(out)
        update = size_bytes(eqn.invars[1 if eqn.primitive.name == "dynamic_update_slice" else 2])
        return update if eqn.primitive.name == "dynamic_update_slice" else 2 * update


def _results(eqn: Any) -> Iterator[tuple[Any, list]]:
    """Each result that is kept, with the variables it is computed from."""
    pairwise = eqn.primitive.name == "optimization_barrier"
    for place, out in enumerate(eqn.outvars):
        if not is_drop_var(out):
            yield out, variables(eqn.invars[place : place + 1] if pairwise else eqn.invars)
