"""Rules of random numbers: blocks of the stream are slices of the whole."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import examples
from tests.partition.rules.harness import check, sizes

pytestmark = pytest.mark.cpu_mesh

shapes = st.lists(sizes, max_size=3)


@examples(8)
@given(shapes, st.integers(0, 99), st.sampled_from((np.uint8, np.uint16, np.uint32)))
def test_bits_of_one_key(shape, seed, dtype):
    check(lambda key: jax.random.bits(key, shape, dtype), jax.random.key(seed), primitives=["random_bits"])


@examples(3)
@given(shapes, sizes)
def test_bits_of_many_keys(shape, count):
    keys = jax.random.split(jax.random.key(0), count)
    check(lambda keys: jax.vmap(lambda key: jax.random.bits(key, shape))(keys), keys, primitives=["random_bits"])


@examples(3)
@given(sizes, sizes)
def test_keys(count, ways):
    keys = jax.random.split(jax.random.key(0), count)

    def derived(keys):
        folded = jax.vmap(lambda key: jax.random.fold_in(key, 7))(keys)
        split = jax.vmap(lambda key: jax.random.split(key, ways))(folded)
        return jax.random.wrap_key_data(jax.random.key_data(split))

    check(derived, keys, primitives=["random_fold_in", "random_split", "random_unwrap", "random_wrap"])


@examples(3)
@given(sizes, sizes, st.booleans())
def test_numbers_folded_into_keys_that_are_broadcast(count, numbers, keys_first):
    keys = jax.random.split(jax.random.key(0), count)

    def each_with_each(keys, numbers):
        if keys_first:
            return jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers))(keys)
        return jax.vmap(lambda i: jax.vmap(lambda key: jax.random.fold_in(key, i))(keys))(numbers)

    check(each_with_each, keys, np.arange(numbers), primitives=["random_fold_in"])


def test_seeds():
    check(lambda seeds: jax.vmap(jax.random.key)(seeds), np.arange(8), primitives=["random_seed"])


@examples(3)
@given(sizes, shapes, st.booleans())
def test_gamma_variables(count, shape, one_key):
    """One key for all, or one each; what is drawn depends on where in the whole array it stands."""
    key = jax.random.key(3)
    alphas = np.linspace(0.3, 4.0, count * math.prod(shape), dtype=np.float32).reshape(count, *shape)
    if one_key:
        check(lambda alphas: jax.random.gamma(key, alphas), alphas, primitives=["random_gamma"], rtol=1e-5)
    else:
        keys = jax.random.split(key, count)
        check(jax.vmap(jax.random.gamma), keys, alphas, primitives=["random_gamma"], rtol=1e-5)


def test_draws_keep_their_distribution():
    key = jax.random.key(0)
    check(lambda key: jax.random.normal(key, (8, 16)), key, primitives=["random_bits"])
    keys = jax.random.split(key, 8)
    check(
        lambda keys: jax.vmap(lambda key: jax.random.gamma(key, 2.0))(keys),
        keys,
        primitives=["random_gamma"],
        rtol=1e-5,
    )
