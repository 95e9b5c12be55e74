"""Sorting and selecting the largest: the dimension sorted along stays whole, all others split freely."""

from __future__ import annotations

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule


@rule("sort")
def sort(eqn: Equation) -> OpRule:
    return _along(eqn, eqn.params["dimension"])


@rule("top_k")
def top_k(eqn: Equation) -> OpRule:
    return _along(eqn, eqn.params["axis"])


@rule("approx_top_k")
def approx_top_k(eqn: Equation) -> OpRule:
    return _along(eqn, eqn.params["reduction_dimension"])


def _along(eqn: Equation, axis: int) -> OpRule:
    """Operands of one shape, results that differ from it along ``axis`` only; ``axis`` may count from the end."""
    operand, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axis %= len(operand)
    builder = RuleBuilder()
    dims = [builder.whole(size) if dim == axis else builder.map(size) for dim, size in enumerate(operand)]
    result_dims = [builder.whole(result[dim]) if dim == axis else factors for dim, factors in enumerate(dims)]
    return builder.build([dims] * len(eqn.invars), [result_dims] * len(eqn.outvars))
