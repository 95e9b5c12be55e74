"""Primitives that move data without computing: each output dimension is made of factors of input dimensions."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Dims, Kind, LocalEquation, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule


@rule("transpose", "squeeze")
def transpose(eqn: Equation) -> OpRule:
    params, builder = eqn.params, RuleBuilder()
    dims = builder.dims(eqn.invars[0].aval.shape)
    dropped = {dim % len(dims) for dim in params.get("dimensions", ())}
    order = params.get("permutation", [dim for dim in range(len(dims)) if dim not in dropped])
    return builder.build([dims], [[dims[dim] for dim in order]], linear=[(0,)])


@rule("broadcast_in_dim")
def broadcast_in_dim(eqn: Equation) -> OpRule:
    """New and widened dimensions may be split although the operand has nothing to split there."""
    operand, shape = eqn.invars[0].aval.shape, eqn.params["shape"]
    builder = RuleBuilder()
    result = builder.dims(shape)
    kept = [
        result[position] if operand[dim] == shape[position] else builder.whole(1)
        for dim, position in enumerate(eqn.params["broadcast_dimensions"])
    ]

    def emit(local: LocalEquation, block, *_dynamic_sizes):
        return local.bind(block, shape=local.result_shape(), **_without_sharding(eqn))

    return builder.build([kept], [result], linear=[(0,)], emit=emit)


@rule("reshape")
def reshape(eqn: Equation) -> OpRule:
    """Merged and split dimensions share their common factors, major first; ``dimensions`` says which is major."""
    builder = RuleBuilder()
    shape = eqn.invars[0].aval.shape
    order = range(len(shape)) if eqn.params["dimensions"] is None else eqn.params["dimensions"]
    ordered, result = common_factors(builder, [shape[dim] for dim in order], eqn.params["new_sizes"])
    operand = tuple(factors for _, factors in sorted(zip(order, ordered, strict=True)))

    def emit(local: LocalEquation, block):
        return local.bind(block, new_sizes=local.result_shape(), **_without_sharding(eqn))

    return builder.build([operand], [result], linear=[(0,)], emit=emit)


def common_factors(builder: RuleBuilder, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """Factors of two row-major shapes of equal size.

    Walking both from the major end, what remains of the current two dimensions shares its greatest common divisor.
    Where that is not one of the two, such as ``(6, 4) -> (8, 3)`` after the shared 2, the rest up to the next common
    boundary is interleaved and stays whole.
    """
    if math.prod(source) == 0:
        return builder.whole_dims(source), builder.whole_dims(target)
    dims: tuple[list[list[int]], list[list[int]]] = ([[] for _ in source], [[] for _ in target])
    shapes = (list(source), list(target))
    at = [0, 0]
    while at[0] < len(source) and at[1] < len(target):
        left, right = shapes[0][at[0]], shapes[1][at[1]]
        shared = math.gcd(left, right)
        if shared > 1:
            factor = builder.factor(shared)
            for side in (0, 1):
                dims[side][at[side]].append(factor)
                shapes[side][at[side]] //= shared
        elif left == 1 or right == 1:
            for side in (0, 1):
                at[side] += shapes[side][at[side]] == 1
        else:
            taken = [1, 1]
            while taken[0] == 1 or taken[0] != taken[1]:
                side = 0 if taken[0] <= taken[1] else 1
                size = shapes[side][at[side]]
                if size > 1:
                    dims[side][at[side]].append(builder.factor(size, Kind.WHOLE))
                taken[side] *= size
                at[side] += 1
    return tuple(map(tuple, dims[0])), tuple(map(tuple, dims[1]))


@rule("rev")
def rev(eqn: Equation) -> OpRule:
    builder = RuleBuilder()
    dims = builder.dims(eqn.invars[0].aval.shape, set(eqn.params["dimensions"]))
    return builder.build([dims], [dims], linear=[(0,)], rearranges=True)


@rule("concatenate", "stack", "split", "unstack")
def join(eqn: Equation) -> OpRule:
    """One value and pieces of it along a dimension, which the pieces may lack; all other dimensions split freely."""
    is_joined = eqn.primitive.name in ("concatenate", "stack")
    pieces, (together,) = (eqn.invars, eqn.outvars) if is_joined else (eqn.outvars, eqn.invars)
    axis = eqn.params["dimension" if eqn.primitive.name == "concatenate" else "axis"]
    builder = RuleBuilder()
    whole = builder.dims(together.aval.shape, {axis})
    lengths = [var.aval.shape[axis : axis + 1 + len(var.aval.shape) - len(whole)] for var in pieces]
    parts = [(*whole[:axis], *builder.whole_dims(length), *whole[axis + 1 :]) for length in lengths]
    operands, results = (parts, [whole]) if is_joined else ([whole], parts)
    return builder.build(operands, results, linear=[range(len(eqn.invars))])


@rule("tile", "pad")
def repeat(eqn: Equation) -> OpRule:
    """A dimension that is repeated once, or has no padding, splits freely; a padding's value is the other operand."""
    operand, *padding = eqn.invars
    if padding:
        kept = [not any(amounts) for amounts in eqn.params["padding_config"]]
    else:
        kept = [times == 1 for times in eqn.params["reps"]]
    builder = RuleBuilder()
    dims, result = builder.shared(operand.aval.shape, eqn.outvars[0].aval.shape, kept)
    return builder.build([dims, *[()] * len(padding)], [result], linear=[range(len(eqn.invars))])


@rule("slice")
def slice_(eqn: Equation) -> OpRule:
    """Dimensions taken whole split freely; of others each device gives what it has, and zeros."""
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    builder = RuleBuilder()
    dims, result, cut = cut_dims(builder, eqn.invars[0].aval, out)
    bounds = list(zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True))
    steps = eqn.params["strides"] or (1,) * len(shape)

    def emit(local: LocalEquation, block: jax.Array) -> Sequence[jax.Array]:
        given = [dim for dim, (factor,) in enumerate(dims) if factor in cut and local.splits[factor]]
        for dim in given:
            rows = np.arange(*bounds[dim], steps[dim])
            block = those_at_hand(block, dim, rows, local.start(dims[dim]))
        whole = [dim in given or shape[dim] == out[dim] for dim in range(len(shape))]
        cuts = [(0, own) if all_ else pair for all_, own, pair in zip(whole, block.shape, bounds, strict=True)]
        strides = (
            tuple(1 if dim in given else step for dim, step in enumerate(steps)) if given else eqn.params["strides"]
        )
        first, last = (tuple(each[end] for each in cuts) for end in (0, 1))
        return local.bind(block, start_indices=first, limit_indices=last, strides=strides)

    return builder.build([dims], [result], linear=[(0,)], cut=cut, emit=emit)


def cut_dims(builder: RuleBuilder, aval: Any, sizes: Sequence[int]) -> tuple[Dims, Dims, list[int]]:
    """Dims of an operand and of what is cut out of it, and the factors that are cut, of which no part is in the result.

    Of what cannot be added up none may be split.
    """
    whole = [size == part for size, part in zip(aval.shape, sizes, strict=True)]
    dims, result = builder.shared(aval.shape, sizes, whole)
    if not jnp.issubdtype(aval.dtype, jnp.number):
        return dims, result, []
    cut = {dim: builder.sum(size) for dim, (size, all_) in enumerate(zip(aval.shape, whole, strict=True)) if not all_}
    return (
        tuple(cut.get(dim, factors) for dim, factors in enumerate(dims)),
        result,
        [factor for (factor,) in cut.values()],
    )


def those_at_hand(block: jax.Array, dim: int, rows: Any, start: jax.Array | int) -> jax.Array:
    """The ``rows`` of a whole of which this device has a ``block`` from ``start`` on; zeros for those of others."""
    own = jnp.asarray(rows) - start
    inside = (own >= 0) & (own < block.shape[dim])
    taken = jnp.take(block, jnp.clip(own, 0, block.shape[dim] - 1), axis=dim, mode="clip")
    return jnp.where(lax.broadcast_in_dim(inside, taken.shape, (dim,)), taken, jnp.zeros_like(taken))


@rule("bitcast_convert_type", "random_wrap", "random_unwrap")
def with_last_dimension(eqn: Equation) -> OpRule:
    """Dimensions are kept, but for a last one that comes or goes: parts of a number, or words of a key."""
    builder = RuleBuilder()
    shapes = [eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape]
    kept = builder.dims(min(shapes, key=len))
    operand, result = ([*kept, *builder.whole_dims(shape[len(kept) :])] for shape in shapes)
    return builder.build([operand], [result])


@rule("iota")
def iota(eqn: Equation) -> OpRule:
    """Each device counts from where its block starts."""
    builder = RuleBuilder()
    result = builder.dims(eqn.params["shape"])
    dimension, dtype = eqn.params["dimension"], eqn.params["dtype"]

    def emit(local: LocalEquation):
        counted = lax.broadcasted_iota(dtype, local.result_shape(), dimension)
        start = local.start(result[dimension])
        return [counted if isinstance(start, int) and start == 0 else counted + jnp.asarray(start).astype(dtype)]

    return builder.build([], [result], emit=emit)


@rule("empty", "empty2", "zeros_like")
def like_operand(eqn: Equation) -> OpRule:
    builder = RuleBuilder()
    result = builder.dims(eqn.outvars[0].aval.shape)

    def emit(local: LocalEquation, *_blocks: jax.Array):
        return [jnp.zeros(local.result_shape(), eqn.outvars[0].aval.dtype)]

    return builder.build([result] * len(eqn.invars), [result], emit=emit)


def _without_sharding(eqn: Equation) -> dict:
    """Sharding hints of automatic meshes mean nothing in the local view."""
    return {"sharding": None} if "sharding" in eqn.params else {}
