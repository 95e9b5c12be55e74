"""Rules of windowed reductions and of ``reduce``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile import _jax_compat
from tests.cases import examples
from tests.partition.rules.harness import check, integers, rules_of, seeds, sizes
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh


@st.composite
def windows(draw, dilated: bool = True):
    """A shape, and window dimensions, strides, padding and dilations for it; about half of the dimensions trivial."""
    shape = draw(st.lists(sizes, min_size=1, max_size=3))
    columns = []
    for size in shape:
        if draw(st.booleans()):
            columns.append((1, 1, (0, 0), 1, 1))
        else:
            small = st.integers(1, 2)
            padding = (draw(st.integers(0, 1)), draw(st.integers(0, 1)))
            dilations = (draw(small), draw(small)) if dilated else (1, 1)
            columns.append((draw(st.integers(1, min(size, 3))), draw(small), padding, *dilations))
    return tuple(shape), tuple(zip(*columns, strict=True))


@examples(24)
@given(windows(), seeds, st.sampled_from(("sum", "max", "min")), st.sampled_from((np.float32, np.int32)))
def test_reduce_window(window, seed, name, dtype):
    shape, params = window
    init, computation = {"sum": (0, lax.add), "max": (-99, lax.max), "min": (99, lax.min)}[name]
    init = {"max": -np.inf, "min": np.inf}.get(name, 0) if dtype is np.float32 else _identity(name, dtype)

    def reduced(x):
        return lax.reduce_window(x, np.asarray(init, dtype), computation, *params)

    check(reduced, integers(shape, seed, dtype), primitives=[f"reduce_window_{name}"])


def _identity(name, dtype):
    limits = np.iinfo(dtype)
    return {"sum": 0, "max": limits.min, "min": limits.max}[name]


@examples(8)
@given(windows(), seeds)
def test_reduce_window_by_a_function_of_two_operands(window, seed):
    shape, params = window

    def largest(x, y):
        wins = x[0] >= y[0]
        return jnp.where(wins, x[0], y[0]), jnp.where(wins, x[1], y[1])

    def reduced(x, y):
        return lax.reduce_window((x, y), (np.float32(-99), np.int32(-1)), largest, *params)

    check(reduced, integers(shape, seed), integers(shape, seed + 1, np.int32), primitives=["reduce_window"])


@examples(10)
@given(windows(dilated=False), seeds)
def test_max_pool_backwards_and_forwards(window, seed):
    shape, (dimensions, strides, padding, _, _) = window
    operand = np.random.default_rng(seed).permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)

    def pooled(x):
        return lax.reduce_window(x, -np.inf, lax.max, dimensions, strides, padding)

    assume(0 not in jax.eval_shape(pooled, operand).shape)

    def tangent_and_cotangent(x, change):
        tangent = jax.jvp(pooled, (x,), (change,))[1]
        return tangent, jax.grad(lambda x: jnp.sum(pooled(x)))(x)

    check(
        tangent_and_cotangent,
        operand,
        integers(shape, seed),
        primitives=["select_and_gather_add", "select_and_scatter_add"],
    )


def test_select_and_scatter_by_functions():
    scalar = np.float32(0)
    select, scatter = (_jax_compat.open_jaxpr(jax.make_jaxpr(f)(scalar, scalar)) for f in (lax.ge, lax.add))

    def scattered(operand, source):
        return lax.select_and_scatter_p.bind(
            operand,
            source,
            scalar,
            select_jaxpr=select,
            select_consts=(),
            scatter_jaxpr=scatter,
            scatter_consts=(),
            window_dimensions=(1, 2),
            window_strides=(1, 2),
            padding=((0, 0), (0, 0)),
        )

    check(scattered, integers((8, 16), 0), integers((8, 8), 1), primitives=["select_and_scatter"])


@examples(12)
@given(st.lists(sizes, min_size=1, max_size=3), seeds, st.data())
def test_reduce_by_a_function_of_two_operands(shape, seed, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))

    def reduced(x, y):
        computation = lambda a, b: (a[0] + b[0] * b[1], a[1] + b[1])  # noqa: E731
        return lax.reduce((x, y), (np.float32(0), np.float32(0)), computation, tuple(axes))

    check(reduced, integers(shape, seed), np.zeros(shape, np.float32), primitives=["reduce"])


def test_windowed_dimensions_are_never_split():
    images = np.zeros((8, 16, 16, 8), np.float32)

    def pooled(x, strides=(1, 2, 2, 1), padding=((0, 0),) * 4):
        return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), strides, padding)

    ((_, rule),) = rules_of(pooled, images, primitive="reduce_window_max")
    assert splittable(rule) == ([{0, 3}], [{0, 3}])
    ((_, rule),) = rules_of(lambda x: pooled(x, (2, 1, 1, 1)), images, primitive="reduce_window_max")
    assert splittable(rule) == ([{3}], [{3}])
    ((_, rule),) = rules_of(
        lambda x: pooled(x, padding=((0, 0),) * 3 + ((1, 7),)), images, primitive="reduce_window_max"
    )
    assert splittable(rule) == ([{0}], [{0}])
    ((_, rule),) = rules_of(pooled, np.zeros((6, 16, 16, 3), np.float32), primitive="reduce_window_max")
    assert splittable(rule) == ([set()], [set()])


def test_reduced_dimensions_are_never_split():
    total = lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + 1, (1,))  # noqa: E731
    ((_, rule),) = rules_of(total, np.zeros((8, 16), np.float32), primitive="reduce")
    assert splittable(rule) == ([{0}, set()], [{0}])
