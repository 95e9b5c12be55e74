"""Rules of primitives that move data without computing."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

from tests.cases import examples
from tests.partition.rules.harness import check, integers, rules_of, seeds, sizes
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh

shapes = st.lists(sizes, min_size=1, max_size=3)
axes = st.integers(0, 2)


@st.composite
def regroupings(draw):
    """Two shapes of one size: the same small factors, grouped differently, ones among them."""
    factors = draw(st.lists(st.sampled_from((1, 2, 2, 3, 4, 8)), min_size=1, max_size=5))

    def grouped(factors):
        cuts = sorted(draw(st.sets(st.integers(0, len(factors)), max_size=4)))
        edges = [0, *cuts, len(factors)]
        return [math.prod(factors[low:high]) for low, high in itertools.pairwise(edges)]

    return grouped(factors), grouped(factors if draw(st.booleans()) else draw(st.permutations(factors)))


@examples(40)
@given(regroupings(), seeds)
def test_reshape(regrouping, seed):
    source, target = regrouping
    assume(source != target)
    check(lambda x: lax.reshape(x, target), integers(source, seed), primitives=["reshape"])


@examples(24)
@given(regroupings(), seeds, st.data())
def test_reshape_of_reordered_dimensions(regrouping, seed, data):
    """What ``vmap`` of a convolution over its kernels does."""
    source, target = regrouping
    order = data.draw(st.permutations(range(len(source))))
    assume(source != target or order != sorted(order))
    operand = [0] * len(source)
    for dim, size in zip(order, source, strict=True):
        operand[dim] = size
    check(lambda x: lax.reshape(x, target, order), integers(operand, seed), primitives=["reshape"])


@examples(8)
@given(shapes, seeds, st.data())
def test_transpose_and_rev(shape, seed, data):
    order = data.draw(st.permutations(range(len(shape))))
    assume(list(order) != sorted(order))
    reversed_dims = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    check(
        lambda x: (lax.transpose(x, order), lax.rev(x, reversed_dims)),
        integers(shape, seed),
        primitives=["transpose", "rev"],
    )


@examples(12)
@given(shapes, seeds, st.data())
def test_broadcast_in_dim(shape, seed, data):
    operand = [size if data.draw(st.booleans()) else 1 for size in shape]
    kept = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    operand = [operand[dim] for dim in kept]
    assume(operand != shape)
    check(lambda x: lax.broadcast_in_dim(x, shape, kept), integers(operand, seed), primitives=["broadcast_in_dim"])


@examples(10)
@given(shapes, seeds, axes, st.lists(sizes, min_size=1, max_size=3))
def test_concatenate_and_split(shape, seed, axis, widths):
    axis %= len(shape)
    parts = [integers([*shape[:axis], width, *shape[axis + 1 :]], seed + i) for i, width in enumerate(widths)]
    if len(widths) > 1:
        check(lambda *args: lax.concatenate(args, axis), *parts, primitives=["concatenate"])
    whole = np.concatenate(parts, axis)
    check(lambda x: lax.split(x, widths, axis), whole, primitives=["split"])


@examples(10)
@given(shapes, seeds, axes, st.integers(1, 8))
def test_stack_unstack_and_tile(shape, seed, axis, count):
    axis %= len(shape) + 1
    parts = [integers(shape, seed + i) for i in range(count)]
    check(lambda *args: lax.stack(args, axis=axis), *parts, primitives=["stack"])
    check(lambda x: lax.unstack(x, axis=axis), np.stack(parts, axis), primitives=["unstack"])


@examples(16)
@given(shapes, seeds, st.data())
def test_pad_and_slice(shape, seed, data):
    config, starts, limits, strides = [], [], [], []
    for size in shape:
        touched = data.draw(st.booleans())
        amounts = (data.draw(st.integers(-1, 3)), data.draw(st.integers(-1, 3)), data.draw(st.integers(0, 2)))
        assume(size > 1 or min(amounts[:2]) >= 0)
        config.append(amounts if touched else (0, 0, 0))
        starts.append(data.draw(st.integers(0, size - 1)) if touched else 0)
        limits.append(data.draw(st.integers(starts[-1] + 1, size)) if touched else size)
        strides.append(data.draw(st.integers(1, 3)) if touched else 1)
    assume(any(any(amounts) for amounts in config))
    padded_and_cut = lambda x: (lax.pad(x, np.float32(7), config), lax.slice(x, starts, limits, strides))  # noqa: E731
    values = integers(shape, seed)
    cut = [*starts, *strides] != [0] * len(shape) + [1] * len(shape) or limits != list(shape)
    check(padded_and_cut, values, primitives=["pad", "slice"] if cut else ["pad"])


@examples(6)
@given(shapes, axes, st.sampled_from((np.int32, np.float32, np.uint8)))
def test_iota(shape, axis, dtype):
    check(lambda: lax.broadcasted_iota(dtype, shape, axis % len(shape)), primitives=["iota"])


def test_squeeze():
    check(lambda x: lax.squeeze(x, (1, 3)), integers((8, 1, 4, 1), 0), primitives=["squeeze"])


def test_what_is_cut_is_split_if_it_can_be_added_up():
    for dtype, dims in ((np.float32, {0, 1}), (np.bool_, {0})):
        ((_, rule),) = rules_of(lambda x: lax.slice(x, (0, 8), (8, 16)), np.zeros((8, 16), dtype), primitive="slice")
        assert splittable(rule) == ([dims], [{0}])


def test_what_is_joined_is_never_split():
    x = np.zeros((8, 16), np.float32)
    ((_, rule),) = rules_of(lambda x: lax.concatenate([x, x], 1), x, primitive="concatenate")
    assert splittable(rule) == ([{0}, {0}], [{0}])
    ((_, rule),) = rules_of(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (8, 8, 0))), x, primitive="pad")
    assert splittable(rule) == ([{0}, set()], [{0}])
    ((_, rule),) = rules_of(lambda x: jnp.flip(x, 0), x, primitive="rev")
    assert splittable(rule) == ([{1}], [{1}])


def test_a_merged_dimension_is_split_by_its_major_factor():
    ((_, rule),) = rules_of(lambda x: lax.reshape(x, (128,)), np.zeros((8, 16), np.float32), primitive="reshape")
    assert splittable(rule) == ([{0}], [{0}])
    ((_, rule),) = rules_of(lambda x: lax.reshape(x, (48,)), np.zeros((3, 16), np.float32), primitive="reshape")
    assert splittable(rule) == ([set()], [set()])
