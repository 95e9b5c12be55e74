"""Gather, scatter and dynamic slices: batches of indices, and windows that span their dimension, split freely.

A window that spans its dimension starts at 0 or is out of bounds, on one device's block as on the whole, so every
``GatherScatterMode`` treats it alike in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Kind, LocalEquation, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule


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
    dims |= {dim: builder.whole(operand[dim]) for dim in numbers.collapsed_slice_dims}
    window = []
    for dim in (dim for dim in range(len(operand)) if dim not in dims):
        dims[dim], in_result = _window(builder, operand[dim], sizes[dim])
        window.append(in_result)
    result = _interleave(numbers.offset_dims, window, index_batch)
    return builder.build(
        [[dims[dim] for dim in range(len(operand))], [*index_batch, builder.whole(indices[-1])]],
        [result],
        linear=() if _fills(eqn) else [(0,)],
        emit=_local_slice_sizes,
    )


def _fills(eqn: Equation) -> bool:
    """Whether out-of-bounds windows are filled with something that partial sums would add up."""
    return eqn.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP and eqn.params["fill_value"] != 0


def _local_slice_sizes(local: LocalEquation, operand: jax.Array, *indices: jax.Array) -> Sequence[jax.Array]:
    """Windows that span a dimension of the whole operand span that of its block."""
    whole = local.eqn.invars[0].aval.shape
    sizes = tuple(
        block if size == full else size
        for size, full, block in zip(local.params["slice_sizes"], whole, operand.shape, strict=True)
    )
    return local.bind(operand, *indices, slice_sizes=sizes)


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
    dims |= {dim: builder.whole(operand[dim]) for dim in numbers.inserted_window_dims}
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
    )


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
