"""Transposed matrix products: XLA:GPU transposes them once more in memory where a dimension is split behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend import core as jex


def without_transpose(
    eqn: jex.JaxprEqn, maker: Callable[[Any], tuple[jex.JaxprEqn | None, int]], uses: Callable[[Any], int]
) -> jex.JaxprEqn:
    """The product of the operands the other way round, where ``eqn`` is the transpose of a product.

    So JAX writes the gradient of a kernel, such as that of an attention's projection.

    Before::

        p:f32[4,16,64] = dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] y:f32[8,32,4,16] x:f32[8,32,64]
        transpose[permutation=(2, 0, 1)] p

    After, with ``p`` dead::

        dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] x y

    Args:
      eqn: any equation; others than the only readers of such a product come back as they are.
      maker: the equation that a value comes from, and which of its results it is.
      uses: how often a value is read.
    """
    product, _ = maker(eqn.invars[0]) if eqn.primitive.name == "transpose" else (None, 0)
    if product is None or product.primitive.name != "dot_general" or uses(eqn.invars[0]) != 1:
        return eqn
    precision, sharding = product.params["precision"], product.params["out_sharding"]
    plain = sharding is None and (precision is None or isinstance(precision, tuple))
    if not plain or tuple(eqn.params["permutation"]) != _operands_swapped(product):
        return eqn
    (left, right), (left_batch, right_batch) = product.params["dimension_numbers"]
    params = {
        **product.params,
        "dimension_numbers": ((right, left), (right_batch, left_batch)),
        "precision": precision and precision[::-1],
    }
    return product.replace(invars=product.invars[::-1], outvars=eqn.outvars, params=params)


def _operands_swapped(product: jex.JaxprEqn) -> tuple[int, ...]:
    """Which dimensions of the product are those of the product the other way round."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    result: Any = product.outvars[0].aval
    operand: Any = product.invars[0].aval
    rank, batched = len(result.shape), len(batch)
    left = len(operand.shape) - len(contracted) - batched
    return (*range(batched), *range(batched + left, rank), *range(batched, batched + left))
