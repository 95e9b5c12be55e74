"""Reductions, cumulative operations, sorting: dimensions that no element is combined along split freely."""

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Kind, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

_REDUCTIONS = {
    "reduce_sum": Kind.SUM,
    **dict.fromkeys(("reduce_max", "reduce_or"), Kind.MAX),
    **dict.fromkeys(("reduce_min", "reduce_and"), Kind.MIN),
    **dict.fromkeys(("reduce", "reduce_prod", "reduce_xor", "argmax", "argmin"), Kind.WHOLE),
}
"""What splitting a reduced dimension does; on booleans any is a maximum, and all a minimum."""


@rule(*_REDUCTIONS)
def reduction(eqn: Equation) -> OpRule:
    """``operands[shape]..., initial scalars... -> [kept dimensions]...``."""
    name, params, results = eqn.primitive.name, eqn.params, len(eqn.outvars)
    by_bits = name in ("reduce_or", "reduce_and") and eqn.outvars[0].aval.dtype != bool
    kind = Kind.WHOLE if by_bits else _REDUCTIONS[name]
    builder = RuleBuilder()
    reduced = set(params["dimensions"] if name == "reduce" else params["axes"])
    shape = enumerate(eqn.invars[0].aval.shape)
    dims = [(builder.factor(size, kind if dim in reduced else Kind.MAP),) for dim, size in shape]
    kept = [factors for dim, factors in enumerate(dims) if dim not in reduced]
    operands = [dims] * results + [()] * (len(eqn.invars) - results)
    return builder.build(operands, [kept] * results, linear=[(0,)] if name == "reduce_sum" else ())


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(eqn: Equation) -> OpRule:
    builder = RuleBuilder()
    dims = builder.dims(eqn.invars[0].aval.shape, {eqn.params["axis"]})
    return builder.build([dims], [dims], linear=[(0,)] if eqn.primitive.name == "cumsum" else ())


_SORTED_ALONG = {"sort": "dimension", "top_k": "axis", "approx_top_k": "reduction_dimension"}


@rule(*_SORTED_ALONG)
def sort(eqn: Equation) -> OpRule:
    """Operands of one shape, results that differ from it along one dimension only, which may count from the end."""
    shape, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axis = eqn.params[_SORTED_ALONG[eqn.primitive.name]] % len(shape)
    builder = RuleBuilder()
    dims, sorted_dims = builder.shared(shape, result, [dim != axis for dim in range(len(shape))])
    return builder.build([dims] * len(eqn.invars), [sorted_dims] * len(eqn.outvars))
