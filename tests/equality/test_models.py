"""Every model of ``models/`` trains sharded as it does on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jax_deepcompile as deepcompile
from models import gpt2, llama, mixtral, resnet, vit
from tests.equality.harness import MESHES, assert_close, assert_same_training

pytestmark = pytest.mark.cpu_mesh

KEY_BIAS = "['key']['bias']"
"""A softmax does not change when all its scores do, so the bias of attention keys has no gradient."""

TOLERANCE = 3e-5
"""What 1e-5 of a gradient becomes in AdamW's update, where it counts in the mean and in the root of the square."""

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


class TrainState(train_state.TrainState):
    dropout_key: Any = None
    batch_stats: Any = None


def tokens(seed: int, size: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (size, 17), np.int32)


def images(seed: int, size: int = 8, pixels: int = 16) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "image": random.standard_normal((size, pixels, pixels, 3), np.float32),
        "label": random.integers(0, 10, size, np.int32),
    }


def language_step(state: TrainState, batch):
    key = jax.random.fold_in(state.dropout_key, state.step)

    def loss_of(params):
        kwargs = {"train": True, "rngs": {"dropout": key}} if state.batch_stats is None else {}
        logits = state.apply_fn({"params": params}, batch[:, :-1], **kwargs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def create_linen(model, example, **fields):
    def create(key):
        variables = model.init(key, example)
        stats = variables.get("batch_stats", fields.get("batch_stats"))
        return TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=OPTIMIZER, dropout_key=key, batch_stats=stats
        )

    return create


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama(dtype: str):
    """In bfloat16 a gradient is rounded on every device before it is summed; second moments square the difference.

    Bound: 4 % of a leaf's largest element, five roundings of 2**-8 twice over.
    """
    cfg = dataclasses.replace(llama.LLAMA_TINY, dtype=jnp.dtype(dtype))
    create = create_linen(llama.Llama(cfg), jnp.zeros((1, 8), jnp.int32), batch_stats=())
    tolerance = TOLERANCE if dtype == "float32" else 4e-2
    meshes = MESHES if dtype == "float32" else {"8": MESHES["8"]}
    assert_same_training(language_step, create, [tokens(seed) for seed in range(3)], meshes, tolerance)


def test_gpt2_with_dropout():
    create = create_linen(gpt2.GPT2(gpt2.GPT2_TINY), jnp.zeros((1, 8), jnp.int32))
    assert_same_training(
        language_step, create, [tokens(seed, 16) for seed in range(3)], tolerance=TOLERANCE, noise=KEY_BIAS
    )


def test_resnet_with_batch_norm():
    model = resnet.ResNet(resnet.RESNET_TINY)

    def step(state, batch):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
            return resnet.classification_loss(logits, batch["label"]), updates["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss}

    create = create_linen(model, jnp.zeros((1, 32, 32, 3)))
    assert_same_training(step, create, [images(seed, 16, 32) for seed in range(3)], tolerance=1e-4)


def nnx_models():
    return {
        "mixtral": (lambda: mixtral.Mixtral(mixtral.MIXTRAL_TINY, rngs=nnx.Rngs(0)), tokens, mixtral_loss),
        "vit": (lambda: vit.ViT(vit.VIT_TINY, rngs=nnx.Rngs(0)), images, vit_loss),
    }


def mixtral_loss(model, batch):
    logits, balance = model(batch[:, :-1])
    return mixtral.next_token_loss(logits, batch[:, 1:]) + 0.01 * balance


def vit_loss(model, batch):
    return vit.classification_loss(model(batch["image"], train=True), batch["label"])


@pytest.mark.parametrize("name", ["mixtral", "vit"])
def test_nnx_objects_are_updated_in_place(name: str):
    create, make_batch, loss_of = nnx_models()[name]

    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    def create_both():
        model = create()
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    plain, states, losses = nnx.jit(step), [], []
    model, optimizer = create_both()
    for seed in range(3):
        losses.append(plain(model, optimizer, make_batch(seed)))
        states.append(jax.tree.map(jnp.copy, nnx.state((model, optimizer))))
    for mesh in MESHES.values():
        sharded = deepcompile.shard(step, mesh)
        model, optimizer = sharded.init(create_both)
        for seed in range(3):
            loss = sharded(model, optimizer, make_batch(seed))
            assert_close(loss, losses[seed], 1e-5, f"loss of step {seed}")
            assert_close(nnx.state((model, optimizer)), states[seed], TOLERANCE, f"state after step {seed}", KEY_BIAS)
