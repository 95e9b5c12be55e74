"""Computing a decided jaxpr on one device's blocks: trace this inside ``shard_map`` and the local program falls out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jax_deepcompile import _jax_compat
from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.partition.layout import Fetch, Layout, Split, Step
from jax_deepcompile.partition.narrow_gathers import NarrowBlock, is_gathered, narrow_block
from jax_deepcompile.partition.reshard import MoveKind, apply_move, plan_moves
from jax_deepcompile.partition.rules.base import Kind, LocalEquation


def run_layout(layout: Layout, inputs: Sequence[jax.Array], consts: Sequence = ()) -> list[jax.Array]:
    """Evaluates ``layout`` on this device's blocks of its inputs, and whole constants: its blocks of the outputs."""
    jaxpr, mesh = layout.jaxpr, layout.mesh
    blocks: _Blocks = {var: {mesh.replicated(): value} for var, value in zip(jaxpr.constvars, consts, strict=True)}
    for var, placement, value in zip(jaxpr.invars, layout.inputs, inputs, strict=True):
        blocks[var] = {placement: value}
    narrow: dict[Any, NarrowBlock] = {}
    last_use = _last_uses(jaxpr)
    for index, step in enumerate(layout.steps):
        with _jax_compat.provenance(step.eqn):
            operands = [
                _fetched(blocks, narrow, atom, fetch, mesh, _companion(step, position, blocks))
                for position, (atom, fetch) in enumerate(zip(step.eqn.invars, step.fetches, strict=True))
            ]
            results = _compute(step, operands, mesh)
            for var, computed, kept, value in zip(step.eqn.outvars, step.results, step.kept, results, strict=True):
                blocks[var] = {kept: _moved(value, computed, kept, mesh)}
            if (found := narrow_block(step, operands, narrow)) is not None:
                narrow[step.eqn.outvars[0]] = found
        for atom in set(variables(step.eqn.invars)):
            if last_use[atom] == index:
                del blocks[atom]
    makers = {var: step.eqn for step in layout.steps for var in step.eqn.outvars}
    outputs = []
    for atom, fetch in zip(jaxpr.outvars, layout.outputs, strict=True):
        maker = None if isinstance(atom, jex.Literal) else makers.get(atom)
        with contextlib.nullcontext() if maker is None else _jax_compat.provenance(maker):
            outputs.append(_fetched(blocks, narrow, atom, fetch, mesh))
    return outputs


def _compute(step: Step, operands: list[jax.Array], mesh: MeshAxes) -> Sequence[jax.Array]:
    if not isinstance(step.how, Split):
        kinds = [(isinstance(atom, jex.Literal), atom.aval.dtype) for atom in step.eqn.invars]
        pairs = zip(operands, kinds, strict=True)
        typed = [jnp.asarray(value, dtype) if is_literal else value for value, (is_literal, dtype) in pairs]
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


def _companion(step: Step, position: int, blocks: _Blocks) -> jax.Array | None:
    """A block the equation reads anyway; what is tied to it cannot start before it exists."""
    others = variables([*step.eqn.invars[:position], *step.eqn.invars[position + 1 :]])
    return next((value for value in (next(iter(blocks[atom].values())) for atom in others) if value.ndim), None)


def _last_uses(jaxpr: jex.Jaxpr) -> dict:
    uses = {}
    for index, eqn in enumerate(jaxpr.eqns):
        uses.update(dict.fromkeys(variables(eqn.invars), index))
    uses.update(dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns)))
    return uses


_Blocks = dict[Any, dict[Placement, jax.Array]]
"""The local blocks of every value, by placement; the first is as it was made."""


def _fetched(
    blocks: _Blocks, narrow: Mapping[Any, NarrowBlock], atom, fetch: Fetch, mesh: MeshAxes, companion: Any = None
) -> jax.Array:
    if isinstance(atom, jex.Literal):
        return _moved(atom.val, fetch.source, fetch.target, mesh)
    copies, made = blocks[atom], narrow.get(atom)

    def moved(value: Any, source: Placement, target: Placement) -> Any:
        if fetch.fresh and companion is not None and source != target:
            value, _ = lax.optimization_barrier((value, companion))
        return _moved(value, source, target, mesh)

    if fetch.target not in copies or fetch.fresh:
        if made is not None and next(iter(copies)) == fetch.source and is_gathered(fetch.source, fetch.target, mesh):
            copies[fetch.target] = made.at(fetch.target, mesh, moved)
        else:
            copies[fetch.target] = moved(copies[fetch.source], fetch.source, fetch.target)
    return copies[fetch.target]


def _moved(value: Any, source: Placement, target: Placement, mesh: MeshAxes) -> Any:
    """``value``, a block or the number in a literal, in another placement; a zero is a partial sum as it is."""
    for move in plan_moves(source, target, mesh):
        if isinstance(value, jax.Array):
            value = apply_move(value, move, mesh)
        elif move.kind is not MoveKind.MASK or value:
            value = apply_move(jnp.asarray(value), move, mesh)
    return value
