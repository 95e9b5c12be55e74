"""What planning compiled is to the letter what a call compiles: JAX's compilation cache has it already."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_deepcompile as deepcompile
from jax_deepcompile.lowering.emit import lower

pytestmark = pytest.mark.cpu_mesh

BATCH = np.ones((16, 16), np.float32)


@flax.struct.dataclass
class State:
    params: dict
    step: jax.Array


def create() -> State:
    return State({"w": jnp.ones((16, 8)), "b": jnp.ones(8)}, jnp.int32(0))


def train(state: State, batch, scale=1.0):
    def loss_of(params):
        return scale * jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    params = jax.tree.map(lambda param, grad: param - 0.1 * grad, state.params, grads)
    return State(params, state.step + 1), {"loss": loss, "parts": (loss, None)}


def nnx_train(model: nnx.Linear, batch):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda param, grad: param - 0.1 * grad, nnx.state(model, nnx.Param), grads))
    return loss


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 4}])
@pytest.mark.parametrize(
    ("step", "args", "options"),
    [
        (train, (create(), BATCH), {}),
        (train, (create(), BATCH, 2.0), {}),
        (train, (create(), BATCH), {"donate": False}),
        (train, (create(), BATCH), {"microbatches": 2}),
        (nnx_train, (nnx.Linear(16, 8, rngs=nnx.Rngs(0)), BATCH), {}),
    ],
)
def test_planning_lowers_what_a_call_lowers(step, args, options, mesh):
    traced = deepcompile.shard(step, mesh, **options).trace(*args)
    assert lower(traced.planned, deepcompile.shard(step, mesh).mesh, "cpu").as_text() == traced.lower().as_text()


@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 8}])
@pytest.mark.parametrize("in_state", [True, False])
def test_random_keys_that_a_step_returned_or_took_are_traced_as_they_are(mesh, in_state):
    def noisy(state, batch, key):
        used = state["key"] if in_state else key
        noise = jax.random.normal(used, batch.shape)
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(((batch + noise) @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "key": jax.random.fold_in(state["key"], 1)}, loss

    step = deepcompile.shard(noisy, mesh)
    state, key = step.init(lambda: {"w": jnp.ones((16, 8)), "key": jax.random.key(0)}), jax.random.key(1)
    state, _ = step(state, BATCH, key)
    placed = jax.device_put(key, jax.tree.leaves(state)[0].sharding)
    for given in (key, placed):
        assert step.trace(state, BATCH, given).lower().compile() is not None
