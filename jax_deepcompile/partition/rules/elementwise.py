"""Elementwise primitives: every dimension is a factor of its own, scalars take part in none."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

UNARY_LINEAR = ("neg", "real", "imag", "conj", "copy", "name", "pvary", "stop_gradient")

NONLINEAR = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh digamma eq
    eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to
    lgamma log log1p log2 logistic lt lt_to max min mulhi ne nextafter not one_minus_square or polygamma polynomial
    population_count pow reciprocal reduce_precision regularized_incomplete_beta rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh threefry2x32 xor zeta
"""


_LINEAR = {
    **dict.fromkeys(UNARY_LINEAR, ((0,),)),
    **dict.fromkeys(("add", "sub", "add_any", "complex"), ((0, 1),)),
}


def elementwise(eqn: Equation, linear: Sequence[Sequence[int]] = (), rounded: Sequence[Sequence[int]] = ()) -> OpRule:
    """Operands have the results' rank, their dimensions the results' size or one, or they are scalars."""
    builder = RuleBuilder()
    shape = eqn.outvars[0].aval.shape
    dims = builder.dims(shape)
    operands = [
        tuple(dims[dim] if size == shape[dim] else builder.whole(size) for dim, size in enumerate(var.aval.shape))
        for var in eqn.invars
    ]
    return builder.build(operands, [dims] * len(eqn.outvars), linear=linear, rounded=rounded)


@rule(*NONLINEAR.split(), *_LINEAR)
def by_name(eqn: Equation) -> OpRule:
    return elementwise(eqn, _LINEAR.get(eqn.primitive.name, ()))


@rule("mul")
def multiply(eqn: Equation) -> OpRule:
    result = eqn.outvars[0].aval.dtype
    return elementwise(eqn, [(index,) for index in (0, 1) if _keeps_sums(eqn.invars[index].aval.dtype, result)])


@rule("div")
def divide(eqn: Equation) -> OpRule:
    exact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    return elementwise(eqn, linear=[(0,)] if exact else ())


@rule("select_n")
def select(eqn: Equation) -> OpRule:
    return elementwise(eqn, linear=[range(1, len(eqn.invars))])


@rule("convert_element_type")
def convert(eqn: Equation) -> OpRule:
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if _keeps_sums(source, target):
        return elementwise(eqn, linear=[(0,)])
    floats = jnp.issubdtype(source, jnp.inexact) and jnp.issubdtype(target, jnp.inexact)
    real_part = jnp.issubdtype(source, jnp.complexfloating) and not jnp.issubdtype(target, jnp.complexfloating)
    return elementwise(eqn, rounded=[(0,)] if floats and not real_part else ())


def _keeps_sums(source: np.dtype, target: np.dtype) -> bool:
    """Whether the sum of converted numbers is the converted sum.

    Floats may widen. Integers may narrow: their sums are modulo a power of two, which a wider type would not know of.
    """
    if source == target:
        return True
    if jnp.issubdtype(source, jnp.inexact):
        if not jnp.issubdtype(target, jnp.inexact):
            return False
        wide, narrow = jnp.finfo(target), jnp.finfo(source)
        return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp
    integers = jnp.issubdtype(source, jnp.integer) and jnp.issubdtype(target, jnp.integer)
    return integers and jnp.iinfo(target).bits <= jnp.iinfo(source).bits
