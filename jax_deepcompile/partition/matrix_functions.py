"""Functions of an optimizer's matrices, such as Newton-Schulz iterations: parts of a step that need nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, eval_local, has_side_effects, new_jaxpr, open_jaxpr
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import ELEMENTWISE, EXPENSIVE, PRODUCTS, UNREPEATABLE
from jax_deepcompile.ir.program import Port, Role
from jax_deepcompile.ir.traversal import contains, free_variables, nested_jaxprs, reached_from, variables
from jax_deepcompile.partition.rows import Rows, rows_of, with_rows


@dataclass(frozen=True)
class MatrixFunction:
    """A part of a step that makes matrices of matrices, and needs no others.

    Attributes:
      eqns: what it computes, in order.
      entries: the matrices, or stacks of them.
      shared: all else that it reads.
      exits: what others read of it.
      rows: of stacks of matrices; empty if the entries are matrices each by itself.
    """

    eqns: tuple[Any, ...]
    entries: tuple[Any, ...]
    shared: tuple[jex.Var, ...]
    exits: tuple[jex.Var, ...]
    rows: Rows

    @property
    def matrices(self) -> int:
        return self.entries[0].aval.shape[0] if self.rows else 1

    @property
    def matrix_bytes(self) -> int:
        return size_bytes(self.entries[0]) // self.matrices

    @property
    def kind(self) -> tuple:
        """What functions have in common that are one function of several stacks."""
        jaxpr = new_jaxpr([*self.entries, *self.shared], self.exits, self.eqns)
        return str(jaxpr), _unprinted(jaxpr), bool(self.rows), self.shared

    def of_other_rows(self, entries: Sequence[jax.Array], shared: Sequence[jax.Array]) -> list[jax.Array]:
        """Its exits for stacks of any height."""
        known = dict(zip((*self.entries, *self.shared), (*entries, *shared), strict=True))
        known = with_rows(self.eqns, known, self.rows, entries[0].shape[0])
        return [known[var] for var in self.exits]

    def of_each(self, entries: Sequence[jax.Array], shared: Sequence[jax.Array]) -> list[jax.Array]:
        """Its exits for each matrix in ``entries``, which are stacked."""
        jaxpr = new_jaxpr([*self.entries, *self.shared], self.exits, self.eqns)
        return jax.vmap(lambda *matrices: eval_local(jaxpr, [*matrices, *shared]))(*entries)


def _unprinted(jaxpr: Any) -> tuple:
    """The constants of ``jaxpr``, of which what it prints shows no more than the shape."""
    flat = open_jaxpr(jaxpr)
    atoms = [atom for eqn in flat.eqns for atom in eqn.invars] + list(flat.outvars)
    values = [*(atom.val for atom in atoms if isinstance(atom, jex.Literal)), *closed_consts(jaxpr)]
    inner = [_unprinted(each) for eqn in flat.eqns for each in nested_jaxprs(eqn)]
    return tuple(np.asarray(value).tobytes() for value in values), tuple(inner)


def matrix_functions(jaxpr: jex.Jaxpr, inputs: Sequence[Port]) -> Iterator[MatrixFunction]:
    """What ``jaxpr`` makes of matrices of an optimizer."""
    pure = _of_optimizer(jaxpr, inputs)
    readers = _readers(jaxpr)
    left = set(pure)
    for core in _cores(jaxpr, pure):
        places = _with_what_is_around(jaxpr, core, left, readers)
        left -= places
        eqns = [jaxpr.eqns[place] for place in sorted(places)]
        made = [var for eqn in eqns for var in eqn.outvars]
        exits = [var for var in made if not readers[var] <= places]
        read_of_others = free_variables(eqns, exits)
        entries = tuple(filter(_is_matrix, read_of_others))
        shared = tuple(var for var in read_of_others if var not in entries)
        others = [eqn for place, eqn in enumerate(jaxpr.eqns) if place not in places]
        rows = _rows(eqns, entries, exits) if exits and entries else None
        if rows is not None and reached_from(others, exits).isdisjoint(read_of_others):
            yield MatrixFunction(tuple(eqns), entries, shared, tuple(exits), rows)


def _of_optimizer(jaxpr: jex.Jaxpr, inputs: Sequence[Port]) -> list[int]:
    """Places of equations that read matrices of the optimizer alone, or no matrices; decompositions are left out.

    Of the optimizer is its state, what is joined with it element by element, and what is made of those alone.
    """
    ports = zip(jaxpr.invars, inputs, strict=True)
    own = {var for var, port in ports if port.role is Role.OPTIMIZER and _is_matrix(var)} | _moments(jaxpr, inputs)
    pure = []
    for place, eqn in enumerate(jaxpr.eqns):
        matrices = _matrices(eqn)
        is_own = own >= matrices
        if is_own and not has_side_effects(eqn) and not contains(eqn, EXPENSIVE | UNREPEATABLE):
            pure.append(place)
        if matrices and (is_own or (eqn.primitive.name in ELEMENTWISE and not own.isdisjoint(matrices))):
            own.update(filter(_is_matrix, eqn.outvars))
    return pure


def _moments(jaxpr: jex.Jaxpr, inputs: Sequence[Port]) -> set[jex.Var]:
    """State that nothing reads before it is joined with others, element by element, as parameters are."""
    ports = zip(jaxpr.invars, inputs, strict=True)
    source = {var: var for var, port in ports if port.role.is_state and _is_matrix(var)}
    others = set[jex.Var]()
    for eqn in jaxpr.eqns:
        read_here = {source[var] for var in _matrices(eqn) if var in source}
        if eqn.primitive.name not in ELEMENTWISE:
            others |= read_here
        elif len(_matrices(eqn)) == 1:
            source |= {var: leaf for leaf in read_here for var in eqn.outvars}
    return set(source.values()) - others


def _matrices(eqn: Any) -> set[jex.Var]:
    return {var for var in variables(eqn.invars) if _is_matrix(var)}


def _is_matrix(var: Any) -> bool:
    """Coefficients of an iteration are none."""
    return sum(size >= _LEAST for size in var.aval.shape) > 1


_LEAST = 8
"""Rows and columns of a matrix."""


def is_product(eqn: Any) -> bool:
    """Whether it is one of matrices, or a loop over such."""
    return bool(_matrices(eqn)) and contains(eqn, PRODUCTS)


def _cores(jaxpr: jex.Jaxpr, pure: Sequence[int]) -> list[set[int]]:
    """Products of matrices and what is between them, each with those that it is computed with."""
    heavy = {place for place in pure if is_product(jaxpr.eqns[place])}
    after, before = set[jex.Var](), set[jex.Var]()
    behind, ahead = set(heavy), set(heavy)
    for place in pure:
        if place in heavy or not after.isdisjoint(variables(jaxpr.eqns[place].invars)):
            behind.add(place)
            after.update(jaxpr.eqns[place].outvars)
    for place in reversed(pure):
        if place in heavy or not before.isdisjoint(jaxpr.eqns[place].outvars):
            ahead.add(place)
            before.update(variables(jaxpr.eqns[place].invars))
    cores: list[set[int]] = []
    maker: dict[jex.Var, set[int]] = {}
    for place in sorted(behind & ahead):
        eqn = jaxpr.eqns[place]
        core = {place}
        for other in [maker[var] for var in variables(eqn.invars) if var in maker]:
            if other is not core:
                core |= other
                cores = [each for each in cores if each is not other]
        cores.append(core)
        maker |= {var: core for at in core for var in jaxpr.eqns[at].outvars}
    return cores


def _with_what_is_around(
    jaxpr: jex.Jaxpr, core: set[int], left: Collection[int], readers: Mapping[jex.Var, set[int]]
) -> set[int]:
    """``core`` with what is made for it alone of a matrix it reads, and what is made of its matrices alone.

    Args:
      left: places of what may be taken.
    """
    makers = {var: place for place in left for var in jaxpr.eqns[place].outvars}
    places, more = set[int](), core
    while more:
        places = places | more
        eqns = [jaxpr.eqns[place] for place in places]
        made = {var for eqn in eqns for var in eqn.outvars}
        read = {var for eqn in eqns for var in variables(eqn.invars)}
        near = {makers[var] for var in read if var in makers}.union(*(readers[var] for var in made))
        more = {
            place
            for place in near.intersection(left) - places
            if _belongs(jaxpr.eqns[place], places, made, read, readers)
        }
    return places


def _belongs(
    eqn: Any, places: set[int], made: set[jex.Var], read: set[jex.Var], readers: Mapping[jex.Var, set[int]]
) -> bool:
    """Whether ``eqn`` goes with those at ``places``: it needs no other matrix, or one in place of what it makes."""
    matrices = _matrices(eqn)
    needs_no_other = matrices <= made | read
    is_for_them = all(readers[var] <= places for var in eqn.outvars) and (len(matrices) < 2 or needs_no_other)
    is_of_them = not made.isdisjoint(matrices) and needs_no_other and all(map(_is_matrix, eqn.outvars))
    return is_for_them or is_of_them


def _readers(jaxpr: jex.Jaxpr) -> Mapping[jex.Var, set[int]]:
    """By variable the places of the equations that read it, and -1 for the step's outputs."""
    readers: dict[jex.Var, set[int]] = defaultdict(set)
    for place, eqn in enumerate(jaxpr.eqns):
        for var in variables(eqn.invars):
            readers[var].add(place)
    for var in variables(jaxpr.outvars):
        readers[var].add(-1)
    return readers


def _rows(eqns: Sequence[Any], entries: Sequence[Any], exits: Sequence[Any]) -> Rows | None:
    """The rows of what is made of stacks of matrices, or of ``entries`` that are matrices each by itself.

    None if matrices in a stack depend on one another: together they may be too large for a device.
    """
    if all(var.aval.ndim == 2 for var in entries):
        return {}
    if len({var.aval.shape[0] for var in entries}) > 1 or any(var.aval.ndim < 3 for var in entries):
        return None
    rows = rows_of(eqns, dict.fromkeys(entries, 0))
    return rows if rows is not None and all(rows.get(var) == 0 for var in exits) else None
