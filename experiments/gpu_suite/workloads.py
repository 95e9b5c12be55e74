"""Whole train steps of the models, as users write them: forward, backward, clipping, AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

from experiments.gpu_suite.sizes import LLAMA_SMALLEST
from experiments.random_batches import images, tokens
from models import gpt2, llama, mixtral, resnet, vit

LLAMA_1B = dataclasses.replace(llama.LLAMA3_8B, d_model=2048, n_layers=16, n_heads=32, d_ff=8192)
"""Llama 3.2 1B, but with an output layer of its own: 1.5 billion parameters."""

GPT2_MEDIUM = dataclasses.replace(gpt2.GPT2_SMALL, d_model=1024, n_layers=24, n_heads=16)

MIXTRAL_SMALL = dataclasses.replace(
    mixtral.MIXTRAL_8X7B, d_model=1024, n_layers=4, n_heads=16, d_ff=3584, capacity_factor=1.25
)


class TrainState(train_state.TrainState):
    """With what BatchNorm and dropout carry from step to step; None where a model has neither."""

    batch_stats: Any = None
    dropout_key: Any = None


@dataclass(frozen=True)
class Training:
    """A step and what it takes.

    Attributes:
      step: ``(state, batch) -> (state, loss)``, for one device.
      create: makes the state.
      batch: of numpy arrays.
    """

    step: Callable
    create: Callable[[], TrainState]
    batch: Any


def training(name: str) -> Training:
    """The workload of that name."""
    return _WORKLOADS[name]()


def llama_training(config: llama.LlamaConfig, batch: int, sequence: int) -> Training:
    model = llama.Llama(config)

    def loss_of(params, state, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return llama.next_token_loss(jnp.asarray(logits), tokens[:, 1:]), None

    return _training(
        loss_of,
        lambda: _state(model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]),
        tokens(batch, sequence, config.vocab_size),
    )


def gpt2_training(config: gpt2.GPT2Config, batch: int) -> Training:
    model = gpt2.GPT2(dataclasses.replace(config, dtype=jnp.bfloat16))

    def loss_of(params, state, tokens):
        rngs = {"dropout": jax.random.fold_in(state.dropout_key, state.step)}
        logits = model.apply({"params": params}, tokens[:, :-1], train=True, rngs=rngs)
        return gpt2.next_token_loss(jnp.asarray(logits), tokens[:, 1:]), None

    def create() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
        return _state(params, dropout_key=jax.random.key(1))

    return _training(loss_of, create, tokens(batch, config.max_length, config.vocab_size))


def mixtral_training(config: mixtral.MixtralConfig, batch: int, sequence: int) -> Training:
    create, merge = _functional(lambda: mixtral.Mixtral(config, rngs=nnx.Rngs(0)))

    def loss_of(params, state, tokens):
        logits, balance = merge(params)(tokens[:, :-1])
        return mixtral.next_token_loss(logits, tokens[:, 1:]) + config.balance_weight * balance, None

    return _training(loss_of, create, tokens(batch, sequence, config.vocab_size))


def vit_training(config: vit.ViTConfig, batch: int) -> Training:
    config = dataclasses.replace(config, dtype=jnp.bfloat16)
    create, merge = _functional(lambda: vit.ViT(config, rngs=nnx.Rngs(0)))

    def loss_of(params, state, batch):
        return vit.classification_loss(merge(params)(batch["image"], train=True), batch["label"]), None

    return _training(loss_of, create, images(batch, config.image_size, config.n_classes))


def resnet_training(config: resnet.ResNetConfig, batch: int, pixels: int) -> Training:
    model = resnet.ResNet(dataclasses.replace(config, dtype=jnp.bfloat16))

    def loss_of(params, state, batch):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
        return resnet.classification_loss(logits, batch["label"]), updates["batch_stats"]

    def create() -> TrainState:
        variables = model.init(jax.random.key(0), jnp.zeros((1, pixels, pixels, 3)))
        return _state(variables["params"], batch_stats=variables["batch_stats"])

    return _training(loss_of, create, images(batch, pixels, config.n_classes))


def _training(loss_of: Callable, create: Callable[[], TrainState], batch: Any) -> Training:
    """``loss_of(params, state, batch) -> loss, batch_stats``."""

    def step(state: TrainState, batch: Any):
        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, state, batch)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    return Training(step, create, batch)


def _state(params: Any, **more: Any) -> TrainState:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    return TrainState.create(apply_fn=None, params=params, tx=optimizer, **more)


def _functional(make: Callable[[], nnx.Module]) -> tuple[Callable[[], TrainState], Callable[[Any], Any]]:
    """What creates the state of an NNX model, and what makes the model of its parameters."""
    graph, _, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    return lambda: _state(nnx.split(make(), nnx.Param, ...)[1]), lambda params: nnx.merge(graph, params, rest)


_WORKLOADS: dict[str, Callable[[], Training]] = {
    "llama_1b": lambda: llama_training(LLAMA_1B, batch=4, sequence=2048),
    "gpt2_small": lambda: gpt2_training(gpt2.GPT2_SMALL, batch=8),
    "gpt2_medium": lambda: gpt2_training(GPT2_MEDIUM, batch=4),
    "vit_b16": lambda: vit_training(vit.VIT_B16, batch=128),
    "resnet50": lambda: resnet_training(resnet.RESNET50, batch=128, pixels=224),
    "mixtral_small": lambda: mixtral_training(MIXTRAL_SMALL, batch=4, sequence=1024),
    "llama_smallest": lambda: llama_training(LLAMA_SMALLEST, batch=4, sequence=16),
    "gpt2_tiny": lambda: gpt2_training(gpt2.GPT2_TINY, batch=4),
    "vit_tiny": lambda: vit_training(vit.VIT_TINY, batch=4),
    "resnet_tiny": lambda: resnet_training(resnet.RESNET_TINY, batch=4, pixels=32),
    "mixtral_tiny": lambda: mixtral_training(mixtral.MIXTRAL_TINY, batch=4, sequence=16),
}
