"""Rules of sort and top_k."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tests.cases import examples
from tests.partition.rules.harness import check, integers, rules_of, seeds, sizes
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh

shapes = st.lists(sizes, min_size=1, max_size=3)


@examples(15)
@given(shapes, seeds, st.integers(1, 3), st.data())
def test_sort(shape, seed, count, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    num_keys = data.draw(st.integers(1, count))
    operands = [integers(shape, seed + i, (np.float32, np.int32)[i % 2]) for i in range(count)]
    check(lambda *args: lax.sort(args, dimension=axis, num_keys=num_keys), *operands, primitives=["sort"])


def test_sort_puts_nan_last_in_every_block():
    values = integers((8, 6), 0)
    values[::2, 1] = np.nan
    check(lambda x: lax.sort(x, dimension=1), values, primitives=["sort"])


@examples(15)
@given(shapes, seeds, st.data())
def test_top_k(shape, seed, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, shape[axis]))
    check(lambda x: lax.top_k(x, count, axis=axis), integers(shape, seed, high=99), primitives=["top_k"])


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("aggregate", [True, False])
def test_approx_top_k(axis, aggregate):
    check(
        lambda x: lax.approx_max_k(x, 3, axis, aggregate_to_topk=aggregate),
        np.random.default_rng(0).permutation(64).reshape(8, 8).astype(np.float32),
        primitives=["approx_top_k"],
    )


def test_the_sorted_dimension_is_never_split():
    values = np.zeros((8, 16), np.float32)
    ((_, rule),) = rules_of(lambda x: lax.sort((x, x), dimension=1), values, primitive="sort")
    assert splittable(rule) == ([{0}, {0}], [{0}, {0}])
    ((_, rule),) = rules_of(lambda x: lax.top_k(x, 8, axis=0), values, primitive="top_k")
    assert splittable(rule) == ([{1}], [{1}, {1}])
    ((_, rule),) = rules_of(lambda x: lax.top_k(x, 8), np.zeros((3, 16), np.float32), primitive="top_k")
    assert splittable(rule) == ([set()], [set(), set()])
