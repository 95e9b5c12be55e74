"""The models that people train, with cuDNN attention: layers of full width, planned for 32 H100s that are not here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from jax_deepcompile.hlo.reader import read
from models import llama, mixtral
from tests.schedules import instructions

pytestmark = [pytest.mark.h100_aot, pytest.mark.slow]

LAYERS, GPUS, TOKENS = 2, 32, 2048
OPTIMIZER = optax.adamw(3e-4)


@pytest.fixture(scope="module")
def mesh():
    return deepcompile.targets.h100(nodes=4).make_mesh((GPUS,), ("fsdp",))


def llama_step(attention):
    """A step of Llama-3-70B, and what makes its state."""
    config = dataclasses.replace(llama.LLAMA3_70B, n_layers=LAYERS, attention=attention)
    model = llama.Llama(config)

    def create(key):
        params = model.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)

    def loss_of(params, tokens):
        return llama.next_token_loss(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    return train_step(loss_of), create


def mixtral_step(attention):
    """The same of Mixtral-8x7B, experts with room for 1.25 even shares."""
    config = dataclasses.replace(mixtral.MIXTRAL_8X7B, n_layers=LAYERS, attention=attention, capacity_factor=1.25)
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: mixtral.Mixtral(config, rngs=nnx.Rngs(0))), nnx.Param, ...)

    def create(key):
        made = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape, leaf.dtype), params)
        return TrainState.create(apply_fn=None, params=made, tx=OPTIMIZER)

    def loss_of(params, tokens):
        logits, balance = nnx.merge(graph, params, rest)(tokens[:, :-1])
        return mixtral.next_token_loss(logits, tokens[:, 1:]) + 0.02 * balance

    return train_step(loss_of), create


def train_step(loss_of):
    def step(state, tokens):
        loss, grads = jax.value_and_grad(loss_of)(state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    return step


def simulated(make, attention, mesh, *passes):
    """The compiled step, and its simulation."""
    step, create = make(attention)
    sharded = deepcompile.shard(step, mesh, passes=passes)
    state = sharded.init(create, jax.random.key(0))
    compiled = sharded.lower(state, jax.ShapeDtypeStruct((GPUS, TOKENS + 1), jnp.int32)).compile()
    return compiled, deepcompile.simulate(compiled, mesh)


@pytest.mark.parametrize(
    ("make", "heads"),
    [pytest.param(llama_step, 64, id="Llama-3-70B"), pytest.param(mixtral_step, 32, id="Mixtral-8x7B")],
)
def test_cudnn_attention_is_of_one_sequence_a_gpu_and_saves_time(mesh, make, heads):
    compiled, found = simulated(make, "cudnn", mesh, deepcompile.PrefetchGathers())
    calls = [each for each in instructions(read(compiled.as_text() or "")) if each.target.startswith("__cudnn$fmha")]
    assert {each.target.removeprefix("__cudnn$fmha") for each in calls} == {"Softmax", "SoftmaxBackward"}
    for each in calls:
        config = each.config["cudnn_fmha_backend_config"]
        assert config["mask_type"] == "CAUSAL"
        assert [int(size) for size in config["intermediate_tensor_shape"]["dimensions"]] == [1, heads, TOKENS, TOKENS]
    _, plain = simulated(make, "xla", mesh)
    assert found.compute_s < 0.9 * plain.compute_s
    assert found.exposed_communication_s < plain.exposed_communication_s
