"""Contractions: batch and free dimensions may be split freely, contracted ones make partial sums."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Dims, Kind, LocalEquation, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule


@rule("dot_general")
def dot_general(eqn: Equation) -> OpRule:
    """``x[batch, free, contract] · y[batch, contract, free] -> [batch, free of x, free of y]``.

    Booleans are contracted by "any", which is a maximum.
    """
    builder = RuleBuilder()
    contracted = Kind.MAX if eqn.outvars[0].aval.dtype == bool else Kind.SUM
    dims_x, dims_y, result = product(builder, eqn, eqn.params["dimension_numbers"], contracted)
    return builder.build([dims_x, dims_y], [result], linear=_linear(eqn))


def product(
    builder: RuleBuilder,
    eqn: Equation,
    numbers: Any,
    contracted: Kind,
    group: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[Dims, Dims, Dims]:
    """The dims of the two operands and the result of a product; ``group`` has those of the second that are no part."""
    (contract_x, contract_y), (batch_x, batch_y) = numbers
    shape_x, shape_y = (var.aval.shape for var in eqn.invars[:2])
    dims_x, dims_y = {}, dict(group or {})
    for dim_x, dim_y in zip(batch_x, batch_y, strict=True):
        dims_x[dim_x] = dims_y[dim_y] = builder.map(shape_x[dim_x])
    batch = [dims_x[dim] for dim in batch_x]
    for dim_x, dim_y in zip(contract_x, contract_y, strict=True):
        dims_x[dim_x] = dims_y[dim_y] = (builder.factor(shape_x[dim_x], contracted),)
    free = []
    for dims, shape in ((dims_x, shape_x), (dims_y, shape_y)):
        for dim in [dim for dim in range(len(shape)) if dim not in dims]:
            dims[dim] = builder.map(shape[dim])
            free.append(dims[dim])
    x, y = (tuple(dims[dim] for dim in range(len(dims))) for dims in (dims_x, dims_y))
    return x, y, (*batch, *free)


def _linear(eqn: Equation) -> list[tuple[int]]:
    """The operands a product is linear in.

    Sums of integers are modulo a power of two, which a product computed in a wider type does not know of.
    """
    result = eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(result, jnp.number):
        return []
    operands = enumerate(var.aval.dtype for var in eqn.invars)
    return [(i,) for i, own in operands if jnp.issubdtype(own, jnp.inexact) or own.itemsize == result.itemsize]


@rule("conv_general_dilated")
def convolution(eqn: Equation) -> OpRule:
    """Batch splits freely, output features split with the kernel's; input features are summed; windows stay whole.

    Groups, of features or of the batch, are the major part of the dimensions they divide: a kernel for every example is
    a group for every example.
    """
    lhs, rhs = (var.aval.shape for var in eqn.invars)
    out = eqn.outvars[0].aval.shape
    numbers = eqn.params["dimension_numbers"]
    builder = RuleBuilder()
    lhs_dims, rhs_dims, out_dims = (list(builder.whole_dims(shape)) for shape in (lhs, rhs, out))
    lhs_batch, lhs_feature = numbers.lhs_spec[:2]
    rhs_out, rhs_in = numbers.rhs_spec[:2]
    out_batch, out_feature = numbers.out_spec[:2]
    feature_groups, batch_groups = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    (feature_group,), (batch_group,) = builder.map(feature_groups), builder.map(batch_groups)
    examples, summed = builder.map(out[out_batch]), builder.sum(rhs[rhs_in])
    features = (feature_group, batch_group, *builder.map(out[out_feature] // (feature_groups * batch_groups)))
    lhs_dims[lhs_batch], out_dims[out_batch] = (batch_group, *examples), examples
    lhs_dims[lhs_feature], rhs_dims[rhs_in] = (feature_group, *summed), summed
    rhs_dims[rhs_out] = out_dims[out_feature] = features

    def emit(local: LocalEquation, *operands: jax.Array) -> Sequence[jax.Array]:
        groups = {
            "feature_group_count": local.factor_size(feature_group),
            "batch_group_count": local.factor_size(batch_group),
        }
        return local.bind(*operands, **groups)

    return builder.build([lhs_dims, rhs_dims], [out_dims], linear=_linear(eqn), emit=emit)
