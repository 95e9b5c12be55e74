"""Where planning decides into how many parts a batch is divided, the fastest that fits is taken, and numbers stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from tests.api.steps import assert_equal, batch, create, step

pytestmark = pytest.mark.cpu_mesh

WIDE = 1 << 14
LIMIT = 4 << 20
"""The hidden layer of 128 examples a device takes 8 MiB."""


def wide(state, batch):
    def loss_of(w):
        hidden = jnp.sin(batch["x"] @ w) @ jnp.ones((8, WIDE))
        return jnp.mean(jnp.cos(hidden) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, loss


def test_as_few_as_fit_are_taken_and_what_was_tried_is_said():
    sharded = deepcompile.shard(wide, microbatches="auto", memory_limit=LIMIT)
    found = sharded(sharded.init(create), batch(1024))
    assert_equal(found, jax.jit(wide)(create(), batch(1024)))
    assert "the fastest of microbatches: 1 takes" in str(sharded.explain())


def test_none_of_those_named_fits():
    sharded = deepcompile.shard(wide, microbatches=(1, 2), memory_limit=LIMIT // 8)
    with pytest.raises(errors.MemoryExceededError) as said:
        sharded.plan(create(), batch(1024))
    assert said.value.needed_bytes > LIMIT // 8


@pytest.mark.parametrize("counts", ["auto", range(1, 3), [2, 1]])
def test_where_nobody_simulates_the_first_is_taken(counts):
    sharded = deepcompile.shard(step, microbatches=counts)
    assert_equal(sharded(sharded.init(create), batch()), jax.jit(step)(create(), batch()))
    assert "fastest of" not in str(sharded.explain())


def test_those_that_do_not_divide_the_batch_are_left_out():
    expected = jax.jit(step)(create(), batch())
    sharded = deepcompile.shard(step, microbatches=[2, 3])
    assert_equal(sharded(sharded.init(create), batch()), expected)
    with pytest.raises(errors.MicrobatchNotDivisibleError, match="do not divide into 3 microbatches"):
        deepcompile.shard(step, microbatches=[5, 3])(create(), batch())


@pytest.mark.parametrize("counts", ["all", "", [], (0, 2), [True], range(0), 2.0])
def test_what_cannot_be_meant_is_refused(counts):
    with pytest.raises(errors.MicrobatchCountError, match=r'several to choose from, .* or "auto"'):
        deepcompile.shard(step, microbatches=counts)
