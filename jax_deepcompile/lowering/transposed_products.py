"""Transposed matrix products: where XLA:GPU reshapes them too, it transposes them in memory."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex

from jax_deepcompile.ir.rewrite import Walk


def without_transposes(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with transposed products as those of the operands the other way round, inside loops and branches too.

    So JAX writes the gradient of a kernel, such as that of an attention's projection.

    Before::

        p:f32[4,16,64] = dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] y:f32[8,32,4,16] x:f32[8,32,64]
        t:f32[64,4,16] = transpose[permutation=(2, 0, 1)] p

    After::

        t:f32[64,4,16] = dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] x y
    """
    walk = Walk(closed, without_transposes)
    readers = _only_readers(walk.jaxpr)
    transposed: set[int] = set()
    for eqn in walk:
        reader = readers.get(eqn.outvars[0]) if eqn.primitive.name == "dot_general" else None
        if reader is not None and _is_swapped(eqn, reader):
            transposed.add(id(reader))
            walk.eqns.append(_the_other_way_round(eqn, reader))
        elif id(eqn) not in transposed:
            walk.eqns.append(eqn)
    return walk.result()


def _only_readers(jaxpr: jex.Jaxpr) -> dict[Any, jex.JaxprEqn | None]:
    """For every value the equation that alone reads it; None if there are more, or it is returned."""
    readers: dict[Any, jex.JaxprEqn | None] = {}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, jex.Literal):
                readers[atom] = None if atom in readers else eqn
    return readers | {atom: None for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)}


def _is_swapped(product: jex.JaxprEqn, reader: jex.JaxprEqn) -> bool:
    """Whether ``reader`` computes what the product of the operands the other way round would."""
    precision, sharding = product.params["precision"], product.params["out_sharding"]
    plain = sharding is None and (precision is None or isinstance(precision, tuple))
    transposes = reader.primitive.name == "transpose"
    return plain and transposes and tuple(reader.params["permutation"]) == _operands_swapped(product)


def _the_other_way_round(product: jex.JaxprEqn, transpose: jex.JaxprEqn) -> jex.JaxprEqn:
    (left, right), (left_batch, right_batch) = product.params["dimension_numbers"]
    precision = product.params["precision"]
    params = {
        **product.params,
        "dimension_numbers": ((right, left), (right_batch, left_batch)),
        "precision": precision and precision[::-1],
    }
    return product.replace(invars=product.invars[::-1], outvars=transpose.outvars, params=params)


def _operands_swapped(product: jex.JaxprEqn) -> tuple[int, ...]:
    """Which dimensions of the product are those of the product the other way round."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    result: Any = product.outvars[0].aval
    operand: Any = product.invars[0].aval
    rank, batched = len(result.shape), len(batch)
    left = len(operand.shape) - len(contracted) - batched
    return (*range(batched), *range(batched + left, rank), *range(batched, batched + left))
