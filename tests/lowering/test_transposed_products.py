"""Transposed products are the products of their operands the other way round, and nothing else is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile._jax_compat import eval_local, open_jaxpr
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.lowering.transposed_products import without_transposes
from tests.cases import examples

pytestmark = pytest.mark.pure


def names(closed) -> list[str]:
    return [eqn.primitive.name for eqn in equations(closed)]


@st.composite
def transposed_products(draw):
    """A function of two operands with any batch, contracted and free dimensions in any order, and their shapes."""
    batch, contracted, left, right = (
        draw(st.lists(st.integers(1, 4), min_size=low, max_size=2)) for low in (0, 0, 1, 1)
    )
    places = [draw(st.permutations(range(len(batch + contracted + free)))) for free in (left, right)]
    shapes = [
        tuple(np.array([*batch, *contracted, *free])[list(order)])
        for free, order in zip((left, right), places, strict=True)
    ]
    where = [np.argsort(order) for order in places]
    batch_dims = tuple(tuple(int(dim) for dim in each[: len(batch)]) for each in where)
    contracting = tuple(tuple(int(dim) for dim in each[len(batch) : len(batch) + len(contracted)]) for each in where)
    first, middle = len(batch), len(batch) + len(left)
    permutation = (*range(first), *range(middle, middle + len(right)), *range(first, middle))

    def transposed(x, y):
        return lax.transpose(lax.dot_general(x, y, (contracting, batch_dims)), permutation)

    return transposed, [tuple(map(int, shape)) for shape in shapes]


@given(transposed_products(), st.integers(0, 99))
@examples(60)
def test_any_product_with_its_operands_swapped(case, seed):
    transposed, shapes = case
    operands = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for shape in shapes]
    after = without_transposes(jax.make_jaxpr(transposed)(*operands))
    assert names(after) == ["dot_general"]
    np.testing.assert_allclose(eval_local(after, operands)[0], transposed(*operands), rtol=1e-5, atol=1e-5)


def read_twice(x, y):
    product = lax.dot_general(x, y, (((0,), (0,)), ((), ())))
    return product.T, product + 1


def returned_as_well(x, y):
    product = lax.dot_general(x, y, (((0,), (0,)), ((), ())))
    return product.T, product


def one_side_only(x, y):
    return lax.transpose(jnp.einsum("abc,ade->bcde", x[:, :, None], y[:, :, None]), (1, 0, 2, 3))


def both_sides_in_themselves(x, y):
    return lax.transpose(jnp.einsum("abc,ade->bcde", x[:, :, None], y[:, :, None]), (3, 2, 1, 0))


def another_algorithm(x, y):
    return lax.dot_general(x, y, (((0,), (0,)), ((), ())), precision=lax.DotAlgorithmPreset.F32_F32_F32).T


@pytest.mark.parametrize(
    "fun", [read_twice, returned_as_well, one_side_only, both_sides_in_themselves, another_algorithm]
)
def test_other_transposes_stay(fun):
    before = jax.make_jaxpr(fun)(jnp.ones((4, 8)), jnp.ones((4, 6)))
    assert without_transposes(before) is before


def test_a_precision_for_each_operand_goes_with_it():
    precision = (lax.Precision.HIGH, lax.Precision.DEFAULT)

    def transposed(x, y):
        return lax.dot_general(x, y, (((0,), (0,)), ((), ())), precision=precision).T

    after = without_transposes(jax.make_jaxpr(transposed)(jnp.ones((4, 8)), jnp.ones((4, 6))))
    (product,) = (eqn for eqn in open_jaxpr(after).eqns if eqn.primitive.name == "dot_general")
    assert product.params["precision"] == precision[::-1]


def test_gradients_of_projections_in_a_layer_loop():
    def loss(kernels, x):
        def layer(x, kernel):
            return jnp.tanh(
                jnp.einsum("btnh,nhd->btd", jnp.einsum("btd,dnh->btnh", x, kernel), kernel.transpose(1, 2, 0))
            ), None

        return lax.scan(layer, x, kernels)[0].sum()

    kernels, x = jnp.ones((3, 8, 2, 4)) * 0.1, jnp.ones((2, 5, 8))
    before = jax.make_jaxpr(jax.grad(loss))(kernels, x)
    after = without_transposes(before)
    assert names(after).count("transpose") < names(before).count("transpose")
    np.testing.assert_allclose(eval_local(after, [kernels, x])[0], jax.grad(loss)(kernels, x), rtol=1e-5)
