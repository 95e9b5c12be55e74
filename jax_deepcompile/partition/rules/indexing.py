"""Gather, scatter and dynamic slices: batches of indices, and windows that span their dimension, split freely.

So does a dimension whose elements are looked up one by one: every device looks up, or adds to, its own, and the results
of a lookup are added up, all but one of them zeros.

A window that spans its dimension starts at 0 or is out of bounds, on one device's block as on the whole, so every
``GatherScatterMode`` treats it alike in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Kind, LocalEquation, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

Mode = lax.GatherScatterMode


@rule("gather")
def gather(eqn: Equation) -> OpRule:
    """``operand[batching, indexed, window], indices[index batch, coordinates] -> [index batch and window]``.

    The index batch includes the batching dimensions, which index and operand share.
    """
    operand, indices = (var.aval.shape for var in eqn.invars)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    builder = RuleBuilder()
    index_batch = [builder.map(size) for size in indices[:-1]]
    dims = _batching(numbers.operand_batching_dims, numbers.start_indices_batching_dims, index_batch)
    adds_up = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.number)
    one_by_one = _one_by_one(eqn, numbers.start_index_map, numbers.collapsed_slice_dims) if adds_up else []
    dims |= {
        dim: builder.sum(operand[dim]) if dim in one_by_one else builder.whole(operand[dim])
        for dim in numbers.collapsed_slice_dims
    }
    window = []
    for dim in (dim for dim in range(len(operand)) if dim not in dims):
        dims[dim], in_result = _window(builder, operand[dim], sizes[dim])
        window.append(in_result)
    result = _interleave(numbers.offset_dims, window, index_batch)
    return builder.build(
        [[dims[dim] for dim in range(len(operand))], [*index_batch, builder.whole(indices[-1])]],
        [result],
        linear=() if _fills(eqn) else [(0,)],
        looked_up=[dims[dim][0] for dim in one_by_one],
        emit=_look_up,
    )


def _one_by_one(eqn: Equation, index_map: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Which of ``dims`` of the operand have their elements chosen one by one, by indices that can be compared."""
    comparable = jnp.issubdtype(eqn.invars[1].aval.dtype, jnp.signedinteger)
    known = eqn.params["mode"] in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)
    return [dim for dim in dims if dim in index_map] if comparable and known else []


def _look_up(local: LocalEquation, operand: jax.Array, indices: jax.Array) -> Sequence[jax.Array]:
    """Zeros where another device has what is looked up. What to fill in out of bounds is the first one's to say."""
    whole, numbers = local.eqn.invars[0].aval.shape, local.params["dimension_numbers"]
    mine: Any = True
    for coordinate, dim in enumerate(numbers.start_index_map):
        if operand.shape[dim] == whole[dim] or local.params["slice_sizes"][dim] == whole[dim]:
            continue
        start, size = local.start(local.rule.operands[0][dim]), operand.shape[dim]
        index = _wide(indices[..., coordinate])
        if local.params["mode"] is Mode.FILL_OR_DROP:
            outside = (index < 0) | (index >= whole[dim])
            inside = ~outside & (index >= start) & (index < start + size)
            mine &= inside | (outside & (start == 0))
            index = jnp.where(outside, -1, index - start)
        else:
            index = jnp.clip(index, 0, whole[dim] - 1)
            mine &= (index >= start) & (index < start + size)
            index = jnp.clip(index - start, 0, size - 1)
        indices = _wide(indices).at[..., coordinate].set(index)
    if mine is True:
        return _local_slice_sizes(local, operand, indices)
    (found,) = _local_slice_sizes(local, operand, indices, indices_are_sorted=False, unique_indices=False)
    batch = [dim for dim in range(found.ndim) if dim not in numbers.offset_dims]
    return [jnp.where(lax.broadcast_in_dim(mine, found.shape, batch), found, jnp.zeros_like(found))]


def _wide(indices: jax.Array) -> jax.Array:
    return indices.astype(jnp.promote_types(indices.dtype, jnp.int32))


def _fills(eqn: Equation) -> bool:
    """Whether out-of-bounds windows are filled with something that partial sums would add up."""
    return eqn.params["mode"] is Mode.FILL_OR_DROP and eqn.params["fill_value"] != 0


def _local_slice_sizes(
    local: LocalEquation, operand: jax.Array, *indices: jax.Array, **params: Any
) -> Sequence[jax.Array]:
    """Windows that span a dimension of the whole operand span that of its block."""
    whole = local.eqn.invars[0].aval.shape
    sizes = tuple(
        block if size == full else size
        for size, full, block in zip(local.params["slice_sizes"], whole, operand.shape, strict=True)
    )
    return local.bind(operand, *indices, slice_sizes=sizes, **params)


@rule("scatter-add", "scatter-sub")
def scatter_sum(eqn: Equation) -> OpRule:
    """Updates split over their index batch make partial sums, to which the operand is added."""
    return _scatter(eqn, Kind.SUM, linear=[(0, 2)])


@rule("scatter-mul")
def scatter_product(eqn: Equation) -> OpRule:
    return _scatter(eqn, Kind.WHOLE, linear=[(0,)])


@rule("scatter-min", "scatter-max")
def scatter_extremum(eqn: Equation) -> OpRule:
    return _scatter(eqn, Kind.WHOLE)


@rule("scatter")
def scatter(eqn: Equation) -> OpRule:
    """Which of several updates of one element stays is undefined, so only scatters that never meet any are linear."""
    distinct = eqn.params["unique_indices"] or all(size == 1 for size in eqn.invars[1].aval.shape[:-1])
    return _scatter(eqn, Kind.WHOLE, linear=[(0, 2)] if distinct and _replaces(eqn.params["update_jaxpr"]) else ())


def _replaces(update_jaxpr) -> bool:
    """Whether a scatter writes its updates as they are; ``lax.scatter_apply`` computes with the operand instead."""
    if update_jaxpr is None:
        return True
    computation = open_jaxpr(update_jaxpr)
    return computation.outvars[0] is computation.invars[1]


def _scatter(eqn: Equation, index_kind: Kind, linear: Sequence[Sequence[int]] = ()) -> OpRule:
    """``operand[batching, indexed, window], indices[index batch, coordinates], updates[index batch and window]``.

    Args:
      index_kind: what splitting an index batch dimension that is not a batching dimension does to the result.
      linear: the sets of operands the scatter is linear in.
    """
    operand, indices, updates = (var.aval.shape for var in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    builder = RuleBuilder()
    index_batch = [
        (builder.factor(size, Kind.MAP if dim in numbers.scatter_indices_batching_dims else index_kind),)
        for dim, size in enumerate(indices[:-1])
    ]
    dims = _batching(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, index_batch)
    one_by_one = _one_by_one(eqn, numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims)
    dims |= {
        dim: builder.map(operand[dim]) if dim in one_by_one else builder.whole(operand[dim])
        for dim in numbers.inserted_window_dims
    }
    in_window = [dim for dim in range(len(operand)) if dim not in dims]
    window = []
    for dim, in_updates in zip(in_window, numbers.update_window_dims, strict=True):
        dims[dim], factors = _window(builder, operand[dim], updates[in_updates])
        window.append(factors)
    operand_dims = [dims[dim] for dim in range(len(operand))]
    return builder.build(
        [
            operand_dims,
            [*index_batch, builder.whole(indices[-1])],
            _interleave(numbers.update_window_dims, window, index_batch),
        ],
        [operand_dims],
        linear=linear,
        addends=(0,) if index_kind is Kind.SUM else (),
        updated=[dims[dim][0] for dim in one_by_one],
        emit=_update,
    )


def _update(local: LocalEquation, operand: jax.Array, indices: jax.Array, updates: jax.Array) -> Sequence[jax.Array]:
    """Indices count from where a device's part starts; what is not in it is out of bounds, and dropped."""
    whole, numbers = local.eqn.invars[0].aval.shape, local.params["dimension_numbers"]
    split = [dim for dim in numbers.inserted_window_dims if operand.shape[dim] != whole[dim]]
    if not split:
        return local.bind(operand, indices, updates)
    windows = iter(numbers.update_window_dims)
    hidden = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = [1 if dim in hidden else local.eqn.invars[2].aval.shape[next(windows)] for dim in range(len(whole))]
    moved = []
    for coordinate, dim in enumerate(numbers.scatter_dims_to_operand_dims):
        index = _wide(indices[..., coordinate])
        if local.params["mode"] is Mode.CLIP:
            index = jnp.clip(index, 0, whole[dim] - sizes[dim])
        moved.append(index - local.start(local.rule.operands[0][dim]) if dim in split else index)
    return local.bind(operand, jnp.stack(moved, axis=-1), updates, mode=Mode.FILL_OR_DROP, indices_are_sorted=False)


def _batching(
    operand_dims: Sequence[int], index_dims: Sequence[int], index_batch: Sequence[tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    return {dim: index_batch[other] for dim, other in zip(operand_dims, index_dims, strict=True)}


def _window(builder: RuleBuilder, size: int, window: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The factors of an operand's dimension and of the window in it: shared where the window spans the dimension."""
    if size == window:
        shared = builder.map(size)
        return shared, shared
    return builder.whole(size), builder.whole(window)


def _interleave(
    window_dims: Sequence[int], window: Sequence[tuple[int, ...]], batch: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Dimensions with those of the window at ``window_dims`` and those of the index batch, in order, elsewhere."""
    windows, batches = iter(window), iter(batch)
    return [next(windows if dim in window_dims else batches) for dim in range(len(window) + len(batch))]


@rule("dynamic_slice")
def dynamic_slice(eqn: Equation) -> OpRule:
    """``operand, *starts -> slice``; dimensions sliced whole split freely, as their start is clamped to 0."""
    operand, *starts = (var.aval.shape for var in eqn.invars)
    builder = RuleBuilder()
    windows = [_window(builder, size, part) for size, part in zip(operand, eqn.params["slice_sizes"], strict=True)]
    return builder.build(
        [[dim for dim, _ in windows], *([()] * len(starts))],
        [[dim for _, dim in windows]],
        linear=[(0,)],
        emit=_local_slice_sizes,
    )


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn: Equation) -> OpRule:
    """``operand, update, *starts -> operand's shape``; dimensions updated whole split freely."""
    operand, update, *starts = (var.aval.shape for var in eqn.invars)
    builder = RuleBuilder()
    windows = [_window(builder, size, part) for size, part in zip(operand, update, strict=True)]
    dims = [dim for dim, _ in windows]
    return builder.build([dims, [dim for _, dim in windows], *([()] * len(starts))], [dims], linear=[(0, 1)])
