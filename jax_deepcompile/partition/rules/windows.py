"""Windowed and general reductions: dimensions whose windows are single elements split freely, the others stay whole."""

from __future__ import annotations

from collections.abc import Sequence

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Dims, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

_SCALAR: Dims = ()


@rule("reduce_window")
def reduce_window(eqn: Equation) -> OpRule:
    """``operands[shape]..., initial scalars... -> [windows]...``."""
    count = len(eqn.outvars)
    builder = RuleBuilder()
    dims, windows = _windowed(builder, eqn, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
    return builder.build([dims] * count + [_SCALAR] * count, [windows] * count)


@rule("reduce_window_max", "reduce_window_min")
def reduce_window_extremum(eqn: Equation) -> OpRule:
    return _map_windows(eqn)


@rule("reduce_window_sum")
def reduce_window_sum(eqn: Equation) -> OpRule:
    return _map_windows(eqn, linear=[(0,)])


@rule("select_and_gather_add")
def select_and_gather(eqn: Equation) -> OpRule:
    """``tangents[shape], operand[shape] -> [windows]``: the tangent of the element each window selects."""
    return _map_windows(eqn, linear=[(0,)])


def _map_windows(eqn: Equation, linear: Sequence[Sequence[int]] = ()) -> OpRule:
    """``operands[shape]... -> [windows]``."""
    builder = RuleBuilder()
    dims, windows = _windowed(builder, eqn, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
    return builder.build([dims] * len(eqn.invars), [windows], linear=linear)


@rule("select_and_scatter_add")
def select_and_scatter_sum(eqn: Equation) -> OpRule:
    """``source[windows], operand[shape] -> [shape]``: every source is added where its window selects."""
    builder = RuleBuilder()
    dims, windows = _windowed(builder, eqn, eqn.invars[1].aval.shape, eqn.invars[0].aval.shape)
    return builder.build([windows, dims], [dims], linear=[(0,)])


@rule("select_and_scatter")
def select_and_scatter(eqn: Equation) -> OpRule:
    """``operand[shape], source[windows], initial scalar -> [shape]``."""
    builder = RuleBuilder()
    dims, windows = _windowed(builder, eqn, eqn.invars[0].aval.shape, eqn.invars[1].aval.shape)
    return builder.build([dims, windows, _SCALAR], [dims])


def _windowed(builder: RuleBuilder, eqn: Equation, shape: Sequence[int], windows: Sequence[int]) -> tuple[Dims, Dims]:
    """The dims of a value of ``shape`` and of one with an element a window: shared where windows are one element."""
    params = eqn.params
    dilation = params.get("base_dilation", (1,) * len(shape))
    dims, window_dims = [], []
    for dim, (size, count) in enumerate(zip(shape, windows, strict=True)):
        steps = (params["window_dimensions"][dim], params["window_strides"][dim], dilation[dim])
        if steps == (1, 1, 1) and tuple(params["padding"][dim]) == (0, 0):
            shared = builder.map(size)
            dims.append(shared)
            window_dims.append(shared)
        else:
            dims.append(builder.whole(size))
            window_dims.append(builder.whole(count))
    return tuple(dims), tuple(window_dims)


@rule("reduce")
def reduce(eqn: Equation) -> OpRule:
    """``operands[shape]..., initial scalars... -> [kept dimensions]...``, reduced by a function of the user's."""
    count = len(eqn.outvars)
    reduced = set(eqn.params["dimensions"])
    builder = RuleBuilder()
    dims = [
        builder.whole(size) if dim in reduced else builder.map(size)
        for dim, size in enumerate(eqn.invars[0].aval.shape)
    ]
    kept = [factors for dim, factors in enumerate(dims) if dim not in reduced]
    return builder.build([dims] * count + [_SCALAR] * count, [kept] * count)
