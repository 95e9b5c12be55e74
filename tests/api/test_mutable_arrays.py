"""Mutable arrays that a step makes itself are values in its program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_deepcompile as deepcompile
from tests.api.steps import assert_equal

pytestmark = pytest.mark.cpu_mesh


def loss_of(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]))


def gradients_summed_in_a_ref(params, x):
    total = jax.tree.map(lambda leaf: jax.new_ref(jnp.zeros_like(leaf)), params)

    def add(_, part):
        grads = jax.grad(loss_of)(params, part)
        jax.tree.map(lambda ref, grad: ref.set(ref[...] + grad / 4), total, grads)
        return _, loss_of(params, part)

    _, losses = jax.lax.scan(add, None, x.reshape(4, -1, x.shape[-1]))
    return losses.mean(), jax.tree.map(lambda ref: ref[...], total)


@jax.jit
def written_row_by_row(params, x):
    hidden = jax.new_ref(jnp.zeros((x.shape[0], 32), jnp.float32))
    for row in range(4):
        part = slice(row * x.shape[0] // 4, (row + 1) * x.shape[0] // 4)
        hidden[part] = jnp.tanh(x[part] @ params["w"])
    return jnp.mean(jnp.square(hidden[...] @ params["v"]))


@pytest.mark.parametrize("graded", [gradients_summed_in_a_ref, jax.value_and_grad(written_row_by_row)])
def test_what_a_step_makes_and_writes_is_a_value(graded):
    def step(params, x):
        loss, grads = graded(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((16, 32), np.float32), "v": rng.standard_normal((32, 8), np.float32)}
    x = rng.standard_normal((64, 16), np.float32)
    expected = jax.jit(step)(params, x)
    assert_equal(deepcompile.shard(step, {"fsdp": 8})(params, x), expected)
