"""Gather, scatter and dynamic slices: batches of indices, and windows that span their dimension, split freely.

So does a dimension whose elements are looked up one by one: every device looks up, or adds to, its own, and the results
of a lookup are added up, all but one of them zeros.

A window that spans its dimension starts at 0 or is out of bounds, on one device's block as on the whole, so every
``GatherScatterMode`` treats it alike in both.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Dims, Kind, LocalEquation, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule
from jax_deepcompile.partition.rules.shape import cut_dims, those_at_hand

Mode = lax.GatherScatterMode


@rule("gather")
def gather(eqn: Equation) -> OpRule:
    """``operand[batching, indexed, window], indices[index batch, coordinates] -> [index batch and window]``.

    The index batch includes the batching dimensions, which index and operand share.
    """
    builder = RuleBuilder()
    numbers = eqn.params["dimension_numbers"]
    hidden = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    sizes = [size for dim, size in enumerate(eqn.params["slice_sizes"]) if dim not in hidden]
    adds_up = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.number)
    operand, indices, result, looked_up = _indexed(builder, eqn, sizes, Kind.MAP, Kind.SUM if adds_up else Kind.WHOLE)
    fills = eqn.params["mode"] is Mode.FILL_OR_DROP and eqn.params["fill_value"] != 0  # which sums would add up
    linear = () if fills else [(0,)]
    return builder.build([operand, indices], [result], linear=linear, looked_up=looked_up, emit=_look_up)


def _indexed(
    builder: RuleBuilder, eqn: Equation, window_sizes: Sequence[int], index_kind: Kind, element_kind: Kind
) -> tuple[Dims, Dims, Dims, list[int]]:
    """Dims of the operand, of the indices, and of index batch and window; factors of elements chosen one by one.

    Args:
      window_sizes: of the window in the dimensions of the operand that it has.
      index_kind: what splitting an index batch dimension that is no batching dimension does to the result.
      element_kind: what splitting a dimension does whose elements are chosen one by one.
    """
    shape, indices = (var.aval.shape for var in eqn.invars[:2])
    window_dims, dropped, index_map, operand_batching, index_batching = eqn.params["dimension_numbers"]
    index_batch = tuple(
        (builder.factor(size, Kind.MAP if dim in index_batching else index_kind),)
        for dim, size in enumerate(indices[:-1])
    )
    dims = {dim: index_batch[other] for dim, other in zip(operand_batching, index_batching, strict=True)}
    chosen = [] if element_kind is Kind.WHOLE else _one_by_one(eqn, index_map, dropped)
    dims |= {dim: (builder.factor(shape[dim], element_kind if dim in chosen else Kind.WHOLE),) for dim in dropped}
    inside = [dim for dim in range(len(shape)) if dim not in dims]
    own, window = builder.shared([shape[dim] for dim in inside], window_sizes)
    dims |= zip(inside, own, strict=True)
    operand = tuple(dims[dim] for dim in range(len(shape)))
    windows, batches = iter(window), iter(index_batch)
    of_both = [next(windows if dim in window_dims else batches) for dim in range(len(window) + len(index_batch))]
    return operand, (*index_batch, builder.whole(indices[-1])), tuple(of_both), [dims[dim][0] for dim in chosen]


def _one_by_one(eqn: Equation, index_map: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Which of ``dims`` of the operand have their elements chosen one by one, by indices that can be compared."""
    comparable = jnp.issubdtype(eqn.invars[1].aval.dtype, jnp.signedinteger)
    known = eqn.params["mode"] in (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)
    return [dim for dim in dims if dim in index_map] if comparable and known else []


def _look_up(local: LocalEquation, operand: jax.Array, indices: jax.Array) -> Sequence[jax.Array]:
    """Zeros where another device has what is looked up. What to fill in out of bounds is the first one's to say."""
    whole, numbers = local.eqn.invars[0].aval.shape, local.params["dimension_numbers"]
    sizes = [local.params["slice_sizes"][dim] for dim in numbers.start_index_map]
    if local.params["mode"] is Mode.CLIP and max(sizes, default=1) > 1:  # see _clamped_slice: XLA may make one of it
        last = [whole[dim] - size for dim, size in zip(numbers.start_index_map, sizes, strict=True)]
        indices = _wide(indices)
        indices = jnp.clip(indices, 0, np.array(last, indices.dtype))
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


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(eqn: Equation) -> OpRule:
    """``operand[batching, indexed, window], indices[index batch, coordinates], updates[index batch and window]``.

    Where they are added, updates split over their index batch make partial sums, to which the operand is added. Which
    of several updates of one element stays is undefined, so only scatters that never meet any are linear.
    """
    match eqn.primitive.name:
        case "scatter-add" | "scatter-sub":
            return _scatter(eqn, Kind.SUM, linear=[(0, 2)])
        case "scatter-mul":
            return _scatter(eqn, Kind.WHOLE, linear=[(0,)])
        case "scatter":
            distinct = eqn.params["unique_indices"] or all(size == 1 for size in eqn.invars[1].aval.shape[:-1])
            replaces = distinct and _replaces(eqn.params["update_jaxpr"])
            return _scatter(eqn, Kind.WHOLE, linear=[(0, 2)] if replaces else ())
    return _scatter(eqn, Kind.WHOLE)


def _replaces(update_jaxpr) -> bool:
    """Whether a scatter writes its updates as they are; ``lax.scatter_apply`` computes with the operand instead."""
    if update_jaxpr is None:
        return True
    computation = open_jaxpr(update_jaxpr)
    return computation.outvars[0] is computation.invars[1]


def _scatter(eqn: Equation, index_kind: Kind, linear: Sequence[Sequence[int]] = ()) -> OpRule:
    builder, updates = RuleBuilder(), eqn.invars[2].aval.shape
    sizes = [updates[dim] for dim in eqn.params["dimension_numbers"].update_window_dims]
    operand, indices, update, updated = _indexed(builder, eqn, sizes, index_kind, Kind.MAP)
    addends = (0,) if index_kind is Kind.SUM else ()
    operands = [operand, indices, update]
    return builder.build(operands, [operand], linear=linear, addends=addends, updated=updated, emit=_update)


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


@rule("dynamic_slice")
def dynamic_slice(eqn: Equation) -> OpRule:
    """``operand, *starts -> slice``; dimensions sliced whole split freely, as their start is clamped to 0."""
    operand, *starts = eqn.invars
    builder = RuleBuilder()
    dims, sliced, cut = cut_dims(builder, operand.aval, eqn.params["slice_sizes"])
    return builder.build([dims, *[()] * len(starts)], [sliced], linear=[(0,)], cut=cut, emit=_clamped_slice)


def _clamped_slice(local: LocalEquation, operand: jax.Array, *starts: jax.Array) -> Sequence[jax.Array]:
    """Starts are clamped beforehand: XLA adds up those of a slice of a slice, as of its block that a device takes."""
    whole, sizes = local.eqn.invars[0].aval.shape, local.params["slice_sizes"]
    last = [full - size for full, size in zip(whole, sizes, strict=True)]
    atoms = zip(local.eqn.invars[1:], starts, last, strict=True)
    clamped = [_clamped(atom, start, most) for atom, start, most in atoms]
    for dim, (factor,) in enumerate(local.rule.operands[0]):
        if factor in local.rule.cut and local.splits[factor]:
            rows = _wide(jnp.asarray(clamped[dim])) + np.arange(sizes[dim])
            operand = those_at_hand(operand, dim, rows, local.start((factor,)))
            clamped[dim] = np.zeros((), clamped[dim].dtype)
    return _local_slice_sizes(local, operand, *clamped)


def _clamped(atom: Any, start: jax.Array, most: int) -> Any:
    """``start``, which ``atom`` stands for, from 0 to ``most``."""
    dtype = atom.aval.dtype
    if most == 0:
        return np.zeros((), dtype)
    if isinstance(atom, jex.Literal) and 0 <= atom.val <= most:
        return start
    return lax.clamp(np.zeros((), dtype), start, np.asarray(min(most, np.iinfo(dtype).max), dtype))


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn: Equation) -> OpRule:
    """``operand, update, *starts -> operand's shape``; dimensions updated whole split freely."""
    operand, update, *starts = eqn.invars
    builder = RuleBuilder()
    dims, updated = builder.shared(operand.aval.shape, update.aval.shape)
    return builder.build([dims, updated, *[()] * len(starts)], [dims], linear=[(0, 1)])
