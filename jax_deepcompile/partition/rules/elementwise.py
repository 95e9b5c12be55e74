"""Elementwise primitives: every dimension is a factor of its own, scalars take part in none."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.primitives import ELEMENTWISE
from jax_deepcompile.partition.rules.base import OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

_UNARY_LINEAR = ("neg", "real", "imag", "conj", "copy", "name", "pvary", "stop_gradient")

_LINEAR = {
    **dict.fromkeys(_UNARY_LINEAR, ((0,),)),
    **dict.fromkeys(("add", "sub", "add_any", "complex"), ((0, 1),)),
}

_RULES_OF_THEIR_OWN = {"mul", "div", "select_n", "convert_element_type", "reshape", "bitcast_convert_type"}


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


@rule(*ELEMENTWISE - _RULES_OF_THEIR_OWN, *_LINEAR, "threefry2x32")
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
