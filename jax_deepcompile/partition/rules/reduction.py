"""Reductions and cumulative operations."""

from __future__ import annotations

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Kind, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule


def reduction(eqn: Equation, kind: Kind, linear: bool = False) -> OpRule:
    """Kept dimensions split freely; ``kind`` says what splitting a reduced one does."""
    shape = eqn.invars[0].aval.shape
    builder = RuleBuilder()
    reduced = set(eqn.params["axes"])
    dims = [(builder.factor(size, kind if dim in reduced else Kind.MAP),) for dim, size in enumerate(shape)]
    result = [factors for dim, factors in enumerate(dims) if dim not in reduced]
    operands = [dims] * len(eqn.invars)
    return builder.build(operands, [result] * len(eqn.outvars), linear=[(0,)] if linear else ())


@rule("reduce_sum")
def reduce_sum(eqn: Equation) -> OpRule:
    return reduction(eqn, Kind.SUM, linear=True)


@rule("reduce_max")
def reduce_max(eqn: Equation) -> OpRule:
    return reduction(eqn, Kind.MAX)


@rule("reduce_min")
def reduce_min(eqn: Equation) -> OpRule:
    return reduction(eqn, Kind.MIN)


@rule("reduce_or", "reduce_and")
def reduce_logical(eqn: Equation) -> OpRule:
    """On booleans, any is a maximum and all a minimum; integers are reduced bit by bit, which neither is."""
    if eqn.outvars[0].aval.dtype != bool:
        return reduction(eqn, Kind.WHOLE)
    return reduction(eqn, Kind.MAX if eqn.primitive.name == "reduce_or" else Kind.MIN)


@rule("reduce_prod", "reduce_xor", "argmax", "argmin")
def reduce_whole(eqn: Equation) -> OpRule:
    return reduction(eqn, Kind.WHOLE)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(eqn: Equation) -> OpRule:
    builder = RuleBuilder()
    axis = eqn.params["axis"]
    dims = [
        builder.whole(size) if dim == axis else builder.map(size) for dim, size in enumerate(eqn.invars[0].aval.shape)
    ]
    return builder.build([dims], [dims], linear=[(0,)] if eqn.primitive.name == "cumsum" else ())
