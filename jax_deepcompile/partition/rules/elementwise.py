"""Elementwise primitives: every dimension is a factor of its own, scalars take part in none."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jax_deepcompile.partition.rules.base import Dims, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

UNARY_LINEAR = ("neg", "real", "imag", "conj", "copy", "copy_p", "reduce_precision_exact", "name", "pvary", "pbroadcast")

NONLINEAR = """
    abs acos acosh add_inexact and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex cos cosh
    digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le
    le_to lgamma log log1p logistic lt lt_to max min ne nextafter not or polygamma population_count pow random_gamma_grad
    random_clone reduce_precision regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square tan tanh threefry2x32 xor zeta
""".split()


def elementwise(eqn: jex.JaxprEqn, linear: Sequence[Sequence[int]] = ()) -> OpRule:
    """Operands have the results' rank, their dimensions the results' size or one, or they are scalars."""
    builder = RuleBuilder()
    shape = eqn.outvars[0].aval.shape
    dims: Dims = tuple(builder.map(size) for size in shape)
    operands = [
        tuple(factors if own == size else builder.whole(own) for factors, own, size in zip(dims, var.aval.shape, shape))
        for var in eqn.invars
    ]
    return builder.build(operands, [dims] * len(eqn.outvars), linear=linear)


@rule(*NONLINEAR)
def nonlinear(eqn: jex.JaxprEqn) -> OpRule:
    return elementwise(eqn)


@rule(*UNARY_LINEAR)
def unary_linear(eqn: jex.JaxprEqn) -> OpRule:
    return elementwise(eqn, linear=[(0,)])


@rule("add", "sub", "add_any")
def sum_of_two(eqn: jex.JaxprEqn) -> OpRule:
    return elementwise(eqn, linear=[(0, 1)])


@rule("mul")
def multiply(eqn: jex.JaxprEqn) -> OpRule:
    return elementwise(eqn, linear=[(0,), (1,)])


@rule("div")
def divide(eqn: jex.JaxprEqn) -> OpRule:
    exact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    return elementwise(eqn, linear=[(0,)] if exact else ())


@rule("select_n")
def select(eqn: jex.JaxprEqn) -> OpRule:
    return elementwise(eqn, linear=[range(1, len(eqn.invars))])


@rule("convert_element_type")
def convert(eqn: jex.JaxprEqn) -> OpRule:
    """Linear where no sum changes: widening floats and integers, and numbers turned into floats."""
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return elementwise(eqn, linear=[(0,)] if _keeps_sums(source, target) else ())


def _keeps_sums(source: np.dtype, target: np.dtype) -> bool:
    if source == target:
        return True
    if not jnp.issubdtype(source, jnp.number) or not jnp.issubdtype(target, jnp.number):
        return False
    if jnp.issubdtype(source, jnp.inexact):
        return jnp.issubdtype(target, jnp.inexact) and jnp.promote_types(source, target) == target
    if jnp.issubdtype(target, jnp.inexact):
        return target.itemsize >= 4
    return np.iinfo(target).bits >= np.iinfo(source).bits and (
        np.issubdtype(target, np.signedinteger) == np.issubdtype(source, np.signedinteger)
    )


@rule("bitcast_convert_type")
def bitcast(eqn: jex.JaxprEqn) -> OpRule:
    """Dimensions are kept, but for a last one that appears or disappears when the width changes."""
    builder = RuleBuilder()
    source, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    rank = min(len(source), len(target))
    shared = [builder.map(size) for size in source[:rank]]
    operand = shared + [builder.whole(size) for size in source[rank:]]
    result = shared + [builder.whole(size) for size in target[rank:]]
    return builder.build([operand], [result])
