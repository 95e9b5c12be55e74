"""Random numbers of any block are those of the global stream, whatever the size, the width and the generator."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.partition.rules.base import OpRule
from jax_deepcompile.partition.rules.families import REGISTRY
from jax_deepcompile.partition.rules.random import _global_index, _multiply_wide, _threefry_block
from tests.cases import examples
from tests.equality.harness import assert_same_training
from tests.partition.rules.harness import rules_of
from tests.partition.rules.ways import splittable
from tests.partition.steps import lines, trace

pytestmark = pytest.mark.cpu_mesh

words = st.integers(0, 2**32 - 1)


def expected_index(shape, block, starts) -> np.ndarray:
    """The row-major index of every element of the block, by 64-bit arithmetic."""
    index = np.zeros(block, np.uint64)
    for dim, (start, size) in enumerate(zip(starts, block, strict=True)):
        stride = np.uint64(math.prod(shape[dim + 1 :]))
        along = (np.arange(size, dtype=np.uint64) + np.uint64(start)) * stride
        index += along.reshape([-1 if other == dim else 1 for other in range(len(block))])
    return index


def check_index(shape, block, starts) -> None:
    high, low = _global_index(shape, block, [jnp.uint32(start) for start in starts])
    found = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low).astype(np.uint64)
    np.testing.assert_array_equal(found, expected_index(shape, block, starts))


@pytest.mark.parametrize(
    ("shape", "block", "starts"),
    [
        ((2**32,), (4,), (2**32 - 4,)),
        ((2**33 // 8, 8), (2, 8), (2**30 - 2, 0)),
        ((2**17, 2**17), (2, 3), (2**17 - 2, 2**17 - 3)),
        ((5, 2**16 + 1, 2**16 + 3), (1, 2, 2), (4, 2**16 - 1, 2**16 + 1)),
        ((2**20, 2**20, 2**20), (2, 2, 2), (2**20 - 2, 2**20 - 2, 2**20 - 2)),
        ((3, 2**31 + 7), (3, 2), (0, 2**31 + 5)),
        ((2**32 - 1, 2**31), (2, 2), (2**32 - 3, 2**31 - 2)),
    ],
)
def test_indices_of_arrays_too_large_for_32_bits(shape, block, starts):
    check_index(shape, block, starts)


@examples(30)
@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=3), st.data())
def test_indices_of_any_block(shape, data):
    block = [data.draw(st.integers(1, min(size, 3))) for size in shape]
    starts = [data.draw(st.integers(0, size - width)) for size, width in zip(shape, block, strict=True)]
    check_index(tuple(shape), tuple(block), starts)


@examples(50)
@given(words, st.integers(0, 2**64 - 1))
def test_wide_products(position, stride):
    high, low = _multiply_wide(jnp.uint32(position), stride)
    assert (int(high) << 32 | int(low)) == position * stride % 2**64


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize(("shape", "block", "starts"), [((5, 12), (5, 4), (0, 8)), ((7,), (3,), (4,)), ((), (), ())])
def test_blocks_are_slices_of_the_whole(dtype, shape, block, starts):
    key = jax.random.key(3)
    whole = np.asarray(jax.random.bits(key, shape, dtype))
    cut = tuple(slice(start, start + size) for start, size in zip(starts, block, strict=True))
    found = _threefry_block(key, shape, block, list(starts), np.dtype(dtype).itemsize * 8)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, whole[cut])


def test_blocks_of_64_bits():
    with jax.enable_x64(True):
        key = jax.random.key(3)
        whole = np.asarray(jax.random.bits(key, (5, 12), np.uint64))
        np.testing.assert_array_equal(_threefry_block(key, (5, 12), (5, 4), [0, 8], 64), whole[:, 8:])


def test_blocks_for_many_keys():
    keys = jax.random.split(jax.random.key(1), (2, 3))
    whole = np.asarray(jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (4, 6))))(keys))
    np.testing.assert_array_equal(_threefry_block(keys, (4, 6), (2, 6), [2, 0], 32), whole[..., 2:, :])


def bits_rule(key) -> OpRule:
    (eqn,) = jax.make_jaxpr(lambda key: jax.random.bits(key, (8, 4)))(key).eqns
    rule = REGISTRY.find(eqn)
    assert isinstance(rule, OpRule)
    return rule


def test_what_may_be_split():
    keys = jax.random.split(jax.random.key(0), 8)
    assert splittable(bits_rule(jax.random.key(0))) == ([set()], [{0}])
    ((_, rule),) = rules_of(
        lambda keys: jax.vmap(lambda k: jax.random.bits(k, (8, 2)))(keys), keys, primitive="random_bits"
    )
    assert splittable(rule) == ([{0}], [{0, 1}])
    ((_, rule),) = rules_of(lambda key: jax.random.split(key, 8), jax.random.key(0), primitive="random_split")
    assert splittable(rule) == ([set()], [set()])


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_streams_that_cannot_be_sliced_are_reported(generator):
    rule = bits_rule(jax.random.key(0, impl=generator))
    assert "cannot be sliced" in rule.reported
    assert splittable(rule, MeshAxes(("x",), (2,)))[1] == [set()]
    assert bits_rule(jax.random.key(0)).reported == ""


def dropout(impl: str, draw):
    def step(state, batch):
        key, used = jax.random.split(state["key"])
        mask = draw(used, batch.shape)

        def loss(w):
            return jnp.mean((mask * (batch @ w)) ** 2)

        value, gradient = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - 0.1 * gradient, "key": key}, value

    def create(_):
        return {"w": jnp.linspace(-1, 1, 256).reshape(16, 16), "key": jax.random.key(5, impl=impl)}

    return step, create


def bernoulli(key, shape):
    return jax.random.bernoulli(key, 0.7, shape).astype(jnp.float32)


def for_each_example(key, shape):
    keys = jax.random.split(key, shape[0])
    return jax.vmap(lambda key: jax.random.normal(key, shape[1:]))(keys)


def folded_in(key, shape):
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(shape[0]))
    return jax.vmap(lambda key: jax.random.uniform(key, shape[1:]))(keys)


def folded_in_twice(key, shape):
    keys = jax.random.split(key, shape[0])
    pairs = jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(shape[1])))(keys)
    return jax.random.uniform(pairs[0, 0], shape) + jax.vmap(jax.vmap(jax.random.uniform))(pairs)


def gamma_for_each_example(key, shape):
    return jax.vmap(lambda key: jax.random.gamma(key, 2.0, shape[1:]))(jax.random.split(key, shape[0]))


def from_key_data(key, shape):
    return jax.random.uniform(jax.random.wrap_key_data(jax.random.key_data(key), impl=jax.random.key_impl(key)), shape)


@pytest.mark.parametrize(
    ("impl", "draw"),
    [
        ("threefry2x32", bernoulli),
        ("threefry2x32", for_each_example),
        ("threefry2x32", folded_in),
        ("threefry2x32", folded_in_twice),
        ("rbg", bernoulli),
        ("rbg", from_key_data),
        ("rbg", for_each_example),
        ("rbg", gamma_for_each_example),
        ("unsafe_rbg", folded_in_twice),
    ],
)
def test_steps_draw_what_they_draw_on_one_device(impl, draw):
    step, create = dropout(impl, draw)
    batches = [np.ones((16, 16), np.float32) * (i + 1) for i in range(2)]
    assert_same_training(step, create, batches, meshes={"2x4": {"data": 2, "fsdp": 4}})


def test_a_mask_is_drawn_in_blocks():
    step, create = dropout("threefry2x32", bernoulli)
    traced = trace(step, jax.eval_shape(create, None), (16, 16))
    found = lines(traced.sharded)
    assert any(line.startswith("threefry2x32") and "u32[2,16]" in line for line in found)
    assert not any("[16,16]" in line for line in found if line.startswith(("random_bits", "threefry2x32")))
