"""Rules of elementwise primitives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

from tests.cases import examples
from tests.partition.rules.harness import check, integers, normals, rules_of, seeds, sizes
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh

shapes = st.lists(sizes, max_size=3)

CLOSE = {"rtol": 1e-5, "atol": 1e-6}

LINEAR = {
    "neg": lax.neg,
    "add": lambda x: lax.add(x, x),
    "sub": lambda x: lax.sub(x, np.float32(2)),
    "mul": lambda x: lax.mul(x, x),
    "div": lambda x: lax.div(x, np.float32(4)),
    "copy": lax.copy_p.bind,
    "complex": lambda x: lax.complex(x, x),
    "select_n": lambda x: lax.select_n(x > 0, x, -x),
}


@examples(16)
@given(shapes, seeds, st.sampled_from(sorted(LINEAR)))
def test_linear(shape, seed, name):
    check(LINEAR[name], integers(shape, seed), primitives=[name])


@examples(6)
@given(shapes, seeds)
def test_complex_parts(shape, seed):
    check(
        lambda z: (lax.real(z), lax.imag(z), lax.conj(z)),
        integers(shape, seed, np.complex64),
        primitives=["real", "imag", "conj"],
    )


@examples(8)
@given(shapes, seeds, st.data())
def test_dimensions_of_size_one_are_broadcast(shape, seed, data):
    kept = [data.draw(st.booleans()) for _ in shape]
    narrow = [size if keep else 1 for size, keep in zip(shape, kept, strict=True)]
    check(
        lambda x, y: (lax.add(x, y), lax.mul(y, x), lax.sub(1.0, x)),
        integers(shape, seed),
        integers(narrow, seed + 1),
        primitives=["add", "mul", "sub"],
    )


def test_scalar_operands():
    x = normals((8, 3), 0)
    check(lambda x: lax.clamp(-0.5, x, x + 1), x, primitives=["clamp"])
    check(lambda x: lax.clamp(np.float32(-0.5), x, np.float32(0.5)), x, primitives=["clamp"])
    whole = integers((8, 3), 0)
    check(lambda x, which: lax.select_n(which, x, 2 * x), whole, np.bool_(True), primitives=["select_n"])
    check(lambda x, power: lax.pow(jnp.abs(x), power), x, np.float32(1.5), primitives=["pow"], **CLOSE)
    check(lambda x: lax.pow(x, np.int32(3)), x, primitives=["pow"], **CLOSE)


NONLINEAR = {
    "exp": lax.exp,
    "tanh": lax.tanh,
    "erf_inv": lax.erf_inv,
    "is_finite": lax.is_finite,
    "abs": lax.abs,
    "floor": lax.floor,
    "max": lambda x: lax.max(x, -2 * x),
    "rem": lambda x: lax.rem(x, np.float32(0.3)),
    "square": lax.square,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "nextafter": lambda x: lax.nextafter(x, 2 * x),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_nonlinear(name):
    check(NONLINEAR[name], normals((8, 3), 0) / 4, primitives=[name], **CLOSE)


def test_threefry():
    words = integers((8, 3), 0, np.uint32, 0)
    check(
        lambda key, x: jax.extend.random.threefry2x32_p.bind(key, key, x, x),
        words[0, 0],
        words,
        primitives=["threefry2x32"],
    )


NUMBERS = ("int8", "int32", "uint32", "bool", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn")


@examples(16)
@given(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), seeds)
def test_conversion(source, target, seed):
    assume(source not in (target, "complex64"))
    values = jnp.asarray(integers((8, 3), seed)).astype(source)
    check(lambda x: lax.convert_element_type(x, target), values, primitives=["convert_element_type"])


def test_conversions_that_change_sums_are_not_linear():
    def linear(source, target):
        args = jnp.zeros(8, source)
        ((_, rule),) = rules_of(lambda x: lax.convert_element_type(x, target), args, primitive="convert_element_type")
        return bool(rule.linear)

    assert linear("bfloat16", "float32")
    assert linear("float32", "complex64")
    assert linear("int32", "int8")
    assert not linear("float32", "bfloat16")
    assert not linear("float16", "bfloat16")
    assert not linear("int8", "int32")
    assert not linear("int32", "float32")
    assert not linear("float32", "int32")
    assert not linear("bool", "int32")


def test_conversions_that_round_may_round_the_parts_of_a_loop():
    def rounds(source, target):
        args = jnp.zeros(8, source)
        ((_, rule),) = rules_of(lambda x: lax.convert_element_type(x, target), args, primitive="convert_element_type")
        return bool(rule.rounded)

    assert rounds("float32", "bfloat16")
    assert rounds("float16", "bfloat16")
    assert not rounds("bfloat16", "float32")
    assert not rounds("float32", "int32")
    assert not rounds("int32", "float32")


@pytest.mark.parametrize("target", ["uint8", "uint32", "uint16"])
def test_bitcast(target):
    check(
        lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, target), np.float32),
        normals((8, 6), 0),
        primitives=["bitcast_convert_type"],
    )


def test_every_dimension_is_split_where_it_divides():
    ((_, rule),) = rules_of(jnp.exp, np.ones((8, 6, 16), np.float32), primitive="exp")
    assert splittable(rule) == ([{0, 2}], [{0, 2}])
    ((_, rule),) = rules_of(lambda x: lax.pow(x, 2.5), np.ones((16,), np.float32), primitive="pow")
    assert splittable(rule) == ([{0}, set()], [{0}])
