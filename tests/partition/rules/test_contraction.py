"""Rules of matrix products and convolutions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile.partition.rules.base import Kind
from tests.cases import examples
from tests.partition.rules.harness import check, integers, rules_of, seeds, sizes
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh


@st.composite
def products(draw):
    """Dimension numbers of a ``dot_general`` with dimensions in any order, and the shapes of its operands."""
    extent = {}

    def letters(kind):
        names = [f"{kind}{i}" for i in range(draw(st.integers(0, 2 if kind == "k" else 1)))]
        extent.update({name: draw(sizes) for name in names})
        return names

    batch, contract = letters("b"), letters("k")
    x, y = (
        draw(st.permutations([*batch, *contract, *letters("m")])),
        draw(st.permutations([*batch, *contract, *letters("n")])),
    )
    numbers = tuple(
        ([x.index(name) for name in names], [y.index(name) for name in names]) for names in (contract, batch)
    )
    return numbers, [extent[name] for name in x], [extent[name] for name in y]


@examples(24)
@given(products(), seeds, st.sampled_from((np.float32, np.int32, np.complex64)))
def test_dot_general(product, seed, dtype):
    numbers, x, y = product
    check(
        lambda x, y: lax.dot_general(x, y, numbers),
        integers(x, seed, dtype),
        integers(y, seed + 1, dtype),
        primitives=["dot_general"],
    )


def test_product_of_booleans():
    x, y = integers((8, 16), 0, bool, 0, 2), integers((16, 4), 1, bool, 0, 2)
    check(lambda x, y: lax.dot_general(x, y, (([1], [0]), ([], []))), x & (x[:, ::-1]), y, primitives=["dot_general"])


def test_products_of_narrow_integers_are_not_linear():
    x = np.ones((8, 8), np.int8)
    product = lambda x: lax.dot(x, x, preferred_element_type=np.int32)  # noqa: E731
    ((_, rule),) = rules_of(product, x, primitive="dot_general")
    assert rule.linear == ()
    check(product, integers((8, 8), 0, np.int8), primitives=["dot_general"])


@st.composite
def convolutions(draw):
    """A convolution in one or two spatial dimensions with any layout, groups and padding."""
    spatial = draw(st.integers(1, 2))
    groups, batch_groups = draw(st.sampled_from(((1, 1), (2, 1), (8, 1), (16, 1), (1, 2), (1, 8))))
    batch, features, outputs = draw(sizes) * batch_groups, draw(sizes), draw(sizes) * groups * batch_groups
    lhs = [batch, features * groups, *[draw(st.integers(3, 8)) for _ in range(spatial)]]
    rhs = [outputs, features, *[draw(st.integers(1, 3)) for _ in range(spatial)]]
    specs = [draw(st.permutations(range(spatial + 2))) for _ in range(3)]

    def place(shape, spec):
        return [shape[spec.index(dim)] for dim in range(len(shape))]

    params = {
        "window_strides": [draw(st.integers(1, 2)) for _ in range(spatial)],
        "padding": [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(spatial)],
        "lhs_dilation": [draw(st.integers(1, 2)) for _ in range(spatial)],
        "rhs_dilation": [1] * spatial,
        "dimension_numbers": lax.ConvDimensionNumbers(*map(tuple, specs)),
        "feature_group_count": groups,
        "batch_group_count": batch_groups,
    }
    return params, place(lhs, specs[0]), place(rhs, specs[1])


@examples(24)
@given(convolutions(), seeds)
def test_convolution(convolution, seed):
    params, lhs, rhs = convolution
    check(
        lambda x, y: lax.conv_general_dilated(x, y, **params),
        integers(lhs, seed),
        integers(rhs, seed + 1),
        primitives=["conv_general_dilated"],
    )


def test_gradient_of_a_grouped_convolution():
    images, kernel = integers((8, 6, 6, 8), 0), integers((3, 3, 1, 16), 1)

    def loss(images, kernel):
        out = lax.conv_general_dilated(
            images, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8
        )
        return jnp.sum(out**2)

    check(jax.grad(loss, (0, 1)), images, kernel, primitives=["conv_general_dilated"])


def test_a_kernel_for_every_example_is_split_with_the_examples():
    images, kernels = np.zeros((16, 4, 9, 9), np.float32), np.zeros((16, 6, 4, 3, 3), np.float32)
    convolve = jax.vmap(lambda x, y: lax.conv(x[None], y, (1, 1), "SAME")[0])
    ((_, rule),) = rules_of(convolve, images, kernels, primitive="conv_general_dilated")
    assert splittable(rule) == ([{1}, {0}], [{1}])


def test_gradients_of_a_kernel_for_every_example():
    images, kernels = integers((8, 2, 5, 5), 0), integers((8, 3, 2, 3, 3), 1)

    def gradients(image, kernel):
        return jax.grad(lambda *args: jnp.sum(lax.conv(args[0][None], args[1], (1, 1), "SAME") ** 2), (0, 1))(
            image, kernel
        )

    check(jax.vmap(gradients), images, kernels, primitives=["conv_general_dilated"])


def test_contracted_dimensions_make_partial_sums():
    x, y = np.zeros((8, 16), np.float32), np.zeros((16, 24), np.float32)
    ((_, rule),) = rules_of(jnp.matmul, x, y, primitive="dot_general")
    assert splittable(rule) == ([{0, 1}, {0, 1}], [{0, 1}])
    assert rule.factors[rule.operands[0][1][0]].kind is Kind.SUM


def test_what_does_not_divide_and_windows_are_never_split():
    x, y = np.zeros((6, 16), np.float32), np.zeros((16, 12), np.float32)
    ((_, rule),) = rules_of(jnp.matmul, x, y, primitive="dot_general")
    assert splittable(rule) == ([{1}, {0}], [set(), set()][:1])
    images, kernel = np.zeros((8, 8, 16), np.float32), np.zeros((16, 8, 8), np.float32)
    convolve = lambda x, y: lax.conv(x, y, (1,), "SAME")  # noqa: E731
    ((_, rule),) = rules_of(convolve, images, kernel, primitive="conv_general_dilated")
    assert splittable(rule) == ([{0, 1}, {0, 1}], [{0, 1}])
