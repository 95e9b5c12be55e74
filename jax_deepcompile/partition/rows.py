"""Functions of stacks of which every row is computed by itself: found, and computed for another number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import bind, closed_consts
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.retrace import read, rescan
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.partition.rules.base import Kind, LocalEquation, OpRule
from jax_deepcompile.partition.rules.families import REGISTRY

Rows = Mapping[Any, int]
"""By variable, those in loops included, the dimension that the rows are along; not of what has none."""


def rows_of(eqns: Sequence[Any], stacks: Rows) -> Rows | None:
    """Where what ``eqns`` make of ``stacks`` has their rows; None if a row of something depends on others."""
    rows = dict(stacks)
    for eqn in eqns:
        if rows.keys().isdisjoint(variables(eqn.invars)):
            continue
        found = _of_loop(eqn, rows) if eqn.primitive.name == "scan" else _of_results(eqn, rows)
        if found is None:
            return None
        rows |= found
    return rows


def with_rows(eqns: Sequence[Any], known: Mapping[Any, jax.Array], rows: Rows, height: int) -> dict[Any, jax.Array]:
    """``known`` values, of stacks of ``height`` rows, and what ``eqns`` make of them."""
    known = dict(known)
    for eqn in eqns:
        operands = [read(atom, known) for atom in eqn.invars]
        if rows.keys().isdisjoint(variables(eqn.invars)):
            results = bind(eqn, operands)
        elif eqn.primitive.name == "scan":
            results = _looped(eqn, operands, rows, height)
        else:
            rule = REGISTRY.find(eqn)
            assert isinstance(rule, OpRule), "rows go through no other regions"
            splits = ((),) * len(rule.factors)
            local = _OfOtherHeight(eqn, rule, splits, MeshAxes((), ()), _row_factor(eqn, rule, rows), height)
            results = rule.emit(local, *operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return known


@dataclass(frozen=True)
class _OfOtherHeight(LocalEquation):
    """An equation about to be computed for ``height`` rows, which are its factor ``row_factor``."""

    row_factor: int | None
    height: int

    def factor_size(self, factor: int) -> int:
        return self.height if factor == self.row_factor else super().factor_size(factor)


def _of_results(eqn: Any, rows: Rows) -> dict[Any, int] | None:
    rule = REGISTRY.find(eqn)
    factor = _row_factor(eqn, rule, rows) if isinstance(rule, OpRule) else None
    if factor is None or not isinstance(rule, OpRule):
        return None
    found = [[at for at, factors in enumerate(dims) if factors == (factor,)] for dims in rule.results]
    if not all(len(places) == 1 for places in found):
        return None
    return {var: at for var, (at,) in zip(eqn.outvars, found, strict=True)}


def _row_factor(eqn: Any, rule: OpRule, rows: Rows) -> int | None:
    """The factor that counts the rows; None if they are not independent, or others than the stacks have it."""
    counted: set[tuple[int, ...]] = set()
    elsewhere: set[int] = set()
    for atom, dims in zip(eqn.invars, rule.operands, strict=True):
        own = None if isinstance(atom, jex.Literal) else rows.get(atom)
        counted |= set() if own is None else {dims[own]}
        elsewhere.update(factor for at, factors in enumerate(dims) if at != own for factor in factors)
    if len(counted) != 1:
        return None
    factor, *more = next(iter(counted))
    is_alone = not more and factor not in elsewhere and rule.factors[factor].kind is Kind.MAP
    return factor if is_alone else None


def _of_loop(eqn: Any, rows: Rows) -> dict[Any, int] | None:
    scan = Scan(eqn)
    places: list[int | None] = [None if isinstance(atom, jex.Literal) else rows.get(atom) for atom in eqn.invars]
    consts, carry, xs = scan.split(places)
    slices = [None if at is None else at - 1 for at in xs]
    if -1 in slices:
        return None
    inputs = zip(scan.body.invars, (*consts, *carry, *slices), strict=True)
    inside = rows_of(scan.body.eqns, {var: at for var, at in inputs if at is not None})
    if inside is None:
        return None
    made = [None if isinstance(atom, jex.Literal) else inside.get(atom) for atom in scan.body.outvars]
    out_carry, ys = scan.split_results(made)
    if out_carry != carry:
        return None
    results = zip(eqn.outvars, (*carry, *(None if at is None else at + 1 for at in ys)), strict=True)
    return {**inside, **{var: at for var, at in results if at is not None}}


def _looped(eqn: Any, operands: list[jax.Array], rows: Rows, height: int) -> list[jax.Array]:
    scan = Scan(eqn)
    consts, carry, xs = scan.split(operands)
    own = dict(zip(scan.body.constvars, closed_consts(scan.closed), strict=True))

    def body(carry: list, slices: list) -> list:
        known = own | dict(zip(scan.body.invars, (*consts, *carry, *slices), strict=True))
        made = with_rows(scan.body.eqns, known, rows, height)
        return [read(atom, made) for atom in scan.body.outvars]

    return rescan(eqn, body, carry, xs)
