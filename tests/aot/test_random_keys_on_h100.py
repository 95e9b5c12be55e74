"""Steps whose state holds random keys, planned for GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jax_deepcompile as deepcompile
from tests.cases import but_slow

pytestmark = pytest.mark.h100_aot

LAYERS, WIDTH = 4, 64
BATCH = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)


def explained(step, *args) -> str:
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    sharded = deepcompile.shard(step, mesh)
    traced = sharded.trace(*args)
    assert traced.plan().prediction is not None
    assert "reduce-scatter" in traced.lower().compile().as_text()
    return str(traced.explain())


@pytest.mark.parametrize("implementation", but_slow(["threefry2x32", "rbg", "unsafe_rbg"], ["threefry2x32", "rbg"]))
def test_dropout_in_a_loop_over_layers(implementation: str):
    def step(state, batch):
        def loss_of(params):
            def layer(x, matrix_and_key):
                matrix, key = matrix_and_key
                return x + jnp.where(jax.random.bernoulli(key, 0.9, x.shape), jnp.tanh(x @ matrix), 0.0), None

            keys = jax.random.split(state["key"], LAYERS)
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch, (params, keys))[0] ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        return {"params": state["params"] - 0.1 * grads, "key": jax.random.fold_in(state["key"], 1)}, loss

    def create():
        return {"params": jnp.zeros((LAYERS, WIDTH, WIDTH)), "key": jax.random.key(0, impl=implementation)}

    assert "pipeline_loops" in explained(step, jax.eval_shape(create), BATCH)


def test_nnx_objects_with_their_own_keys():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.down(self.dropout(jax.nn.gelu(self.up(x))))

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    model = Model(nnx.Rngs(0))
    assert explained(step, model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), BATCH)


def test_a_shuffle_of_more_examples_than_are_sorted_by_one_kernel():
    def step(matrix, batch, key):
        shuffled = batch[jax.random.permutation(key, len(batch))].reshape(64, -1, WIDTH)
        return matrix - jax.grad(lambda matrix: jnp.mean(jnp.tanh(shuffled @ matrix).max(1) ** 2))(matrix)

    shapes = jnp.zeros((WIDTH, WIDTH)), jax.ShapeDtypeStruct((1 << 16, WIDTH), jnp.float32)
    assert explained(step, *shapes, jax.eval_shape(lambda: jax.random.key(0)))
