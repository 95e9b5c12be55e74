"""Computing a decided jaxpr on one device's blocks: trace this inside ``shard_map`` and the local program falls out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jax_deepcompile import _jax_compat
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.partition.layout import Fetch, Layout, Split, Step
from jax_deepcompile.partition.reshard import MoveKind, apply_move, plan_moves
from jax_deepcompile.partition.rules.base import Kind, LocalEquation


def run_layout(layout: Layout, inputs: Sequence[jax.Array], consts: Sequence = ()) -> list[jax.Array]:
    """Evaluates ``layout`` on local blocks.

    Args:
      layout: the decided jaxpr.
      inputs: this device's block of every input, placed as ``layout.inputs`` says.
      consts: the jaxpr's constants, whole.

    Returns:
      This device's block of every output, placed as ``layout.output_placements`` says.
    """
    blocks = _Blocks(layout.mesh)
    whole = layout.mesh.replicated()
    for var, value in zip(layout.jaxpr.constvars, consts, strict=True):
        blocks.write(var, whole, value)
    for var, placement, value in zip(layout.jaxpr.invars, layout.inputs, inputs, strict=True):
        blocks.write(var, placement, value)
    last_use = _last_uses(layout.jaxpr)
    for index, step in enumerate(layout.steps):
        with _jax_compat.provenance(step.eqn):
            operands = [
                blocks.fetch(atom, fetch, _companion(step, position, blocks))
                for position, (atom, fetch) in enumerate(zip(step.eqn.invars, step.fetches, strict=True))
            ]
            results = _compute(step, operands, layout.mesh)
            for var, computed, kept, value in zip(step.eqn.outvars, step.results, step.kept, results, strict=True):
                for move in plan_moves(computed, kept, layout.mesh):
                    value = apply_move(value, move, layout.mesh)
                blocks.write(var, kept, value)
        for atom in set(variables(step.eqn.invars)):
            if last_use[atom] == index:
                blocks.forget(atom)
    makers = {var: step.eqn for step in layout.steps for var in step.eqn.outvars}
    return [
        _delivered(blocks, atom, fetch, None if isinstance(atom, jex.Literal) else makers.get(atom))
        for atom, fetch in zip(layout.jaxpr.outvars, layout.outputs, strict=True)
    ]


def _delivered(blocks: _Blocks, atom, fetch: Fetch, maker: Equation | None) -> jax.Array:
    with contextlib.nullcontext() if maker is None else _jax_compat.provenance(maker):
        return blocks.fetch(atom, fetch, None)


def _compute(step: Step, operands: list[jax.Array], mesh: MeshAxes) -> Sequence[jax.Array]:
    if not isinstance(step.how, Split):
        typed = [_as_array(value, atom) for value, atom in zip(operands, step.eqn.invars, strict=True)]
        return step.how.rule.emit(step, typed, run_layout, mesh)
    rule, splits = step.how.rule, step.how.splits
    results = rule.emit(LocalEquation(step.eqn, rule, splits, mesh), *operands)
    for kind, combine in ((Kind.MAX, lax.pmax), (Kind.MIN, lax.pmin)):
        axes = tuple(
            name for factor, names in zip(rule.factors, splits, strict=True) if factor.kind is kind for name in names
        )
        if axes:
            results = [_extremum(result, axes, combine) for result in results]
    return results


def _extremum(value: jax.Array, axes: tuple[str, ...], combine: Callable) -> jax.Array:
    """``pmax`` or ``pmin`` that, unlike XLA's, yields NaN wherever one of the values is."""
    found = combine(value, axes)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return found
    undefined = lax.pmax(jnp.isnan(value).astype(jnp.int32), axes)
    return jnp.where(undefined > 0, jnp.asarray(jnp.nan, value.dtype), found)


def _as_array(value, atom: Any) -> jax.Array:
    dtype = atom.aval.dtype
    return jnp.asarray(value, dtype) if isinstance(atom, jex.Literal) else value


def _companion(step: Step, position: int, blocks: _Blocks) -> jax.Array | None:
    """A block the equation reads anyway; what is tied to it cannot start before it exists."""
    for other, atom in enumerate(step.eqn.invars):
        if other != position and not isinstance(atom, jex.Literal):
            value = blocks.native(atom)
            if value.ndim:
                return value
    return None


def _last_uses(jaxpr: jex.Jaxpr) -> dict:
    uses = {}
    for index, eqn in enumerate(jaxpr.eqns):
        uses.update(dict.fromkeys(variables(eqn.invars), index))
    uses.update(dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns)))
    return uses


class _Blocks:
    """The local blocks of every value, by placement."""

    def __init__(self, mesh: MeshAxes) -> None:
        self.mesh = mesh
        self.values: dict = {}

    def write(self, var, placement: Placement, value: jax.Array) -> None:
        self.values[var] = {placement: value}

    def native(self, var) -> jax.Array:
        return next(iter(self.values[var].values()))

    def forget(self, var) -> None:
        del self.values[var]

    def fetch(self, atom, fetch: Fetch, companion: jax.Array | None) -> jax.Array:
        if isinstance(atom, jex.Literal):
            return self._move_literal(atom.val, fetch)
        copies = self.values[atom]
        if fetch.target in copies and not fetch.fresh:
            return copies[fetch.target]
        value = copies[fetch.source]
        if fetch.fresh and companion is not None:
            value, _ = lax.optimization_barrier((value, companion))
        for move in plan_moves(fetch.source, fetch.target, self.mesh):
            value = apply_move(value, move, self.mesh)
        copies[fetch.target] = value
        return value

    def _move_literal(self, value, fetch: Fetch) -> jax.Array:
        for move in plan_moves(fetch.source, fetch.target, self.mesh):
            zero = move.kind is MoveKind.MASK and not isinstance(value, jax.Array) and not value
            value = value if zero else apply_move(jnp.asarray(value), move, self.mesh)
        return value
