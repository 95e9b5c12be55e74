"""Whole train steps of the models, as users write them for one device: forward, backward, clipping, AdamW.

Batches are random and the same every time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.training.train_state import TrainState

from experiments.bench.steps import OPTIMIZER, accumulated, training_step
from experiments.small_models import SmallMixer
from models import gpt2, llama, mixtral, resnet, vit


@dataclasses.dataclass(frozen=True)
class Training:
    """A plain step and what it takes.

    Attributes:
      create: makes the state.
      step: ``(state, batch) -> (state, loss)``.
      batch: numpy arrays.
      microbatches: in which ``shard`` works through the batch.
      by_hand: ``devices -> step`` that accumulates gradients in a loop of its own; None where there is nothing to
        accumulate.
    """

    create: Callable[[], Any]
    step: Callable
    batch: Any
    microbatches: int = 1
    by_hand: Callable[[int], Callable] | None = None


def training(create_params: Callable, loss_of: Callable, batch: Any, microbatches: int = 1) -> Training:
    """Trains by ``loss_of(params, batch, step number)``."""

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=create_params(), tx=OPTIMIZER)

    def gradients(state: TrainState, batch: Any):
        return jax.value_and_grad(loss_of)(state.params, batch, state.step)

    def by_hand(devices: int) -> Callable:
        return training_step(accumulated(gradients, microbatches, devices))

    return Training(create, training_step(gradients), batch, microbatches, by_hand if microbatches > 1 else None)


def mlp_training(width: int, layers: int, examples: int) -> Training:
    """Square layers with biases, fitted to targets of the same width."""

    def create_params() -> dict[str, dict[str, jax.Array]]:
        keys = jax.random.split(jax.random.key(0), layers)
        init = nn.initializers.lecun_normal()
        return {
            f"layer_{index}": {"kernel": init(key, (width, width)), "bias": jnp.zeros(width)}
            for index, key in enumerate(keys)
        }

    def loss_of(params: Any, batch: dict[str, jax.Array], _: jax.Array) -> jax.Array:
        x_BxD = batch["x"]
        for layer in params.values():
            x_BxD = jnp.tanh(x_BxD @ layer["kernel"] + layer["bias"][None, :])
        return jnp.square(x_BxD - batch["y"]).mean()

    random = np.random.default_rng(0)
    batch = {name: random.standard_normal((examples, width), np.float32) for name in ("x", "y")}
    return training(create_params, loss_of, batch)


def llama_training(config: llama.LlamaConfig, length: int, examples: int, microbatches: int = 1) -> Training:
    model = llama.Llama(config)

    def create_params() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]

    def loss_of(params: Any, batch: jax.Array, _: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1])
        return llama.next_token_loss(logits, batch[:, 1:])

    return training(create_params, loss_of, tokens(examples, length, config.vocab_size), microbatches)


def gpt2_training(config: gpt2.GPT2Config, length: int, examples: int, microbatches: int = 1) -> Training:
    """With dropout."""
    model = gpt2.GPT2(config)

    def create_params() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]

    def loss_of(params: Any, batch: jax.Array, step: jax.Array) -> jax.Array:
        rngs = {"dropout": jax.random.fold_in(jax.random.key(1), step)}
        logits: Any = model.apply({"params": params}, batch[:, :-1], train=True, rngs=rngs)
        return gpt2.next_token_loss(logits, batch[:, 1:])

    return training(create_params, loss_of, tokens(examples, length, config.vocab_size), microbatches)


def nnx_training(build: Callable[[], nnx.Module], loss_of: Callable, batch: Any, microbatches: int = 1) -> Training:
    """Trains the parameters of an NNX model by ``loss_of(model, batch)``; the rest of it stays as it is."""
    graph, _, rest = nnx.split(nnx.eval_shape(build), nnx.Param, ...)

    def create_params() -> Any:
        return nnx.split(build(), nnx.Param, ...)[1]

    def loss_of_params(params: Any, batch: Any, _: jax.Array) -> jax.Array:
        return loss_of(nnx.merge(graph, params, rest), batch)

    return training(create_params, loss_of_params, batch, microbatches)


def mixtral_training(config: mixtral.MixtralConfig, length: int, examples: int, microbatches: int = 1) -> Training:
    def loss_of(model: mixtral.Mixtral, batch: jax.Array) -> jax.Array:
        logits, balance = model(batch[:, :-1])
        return mixtral.next_token_loss(logits, batch[:, 1:]) + config.balance_weight * balance

    batch = tokens(examples, length, config.vocab_size)
    return nnx_training(lambda: mixtral.Mixtral(config, rngs=nnx.Rngs(0)), loss_of, batch, microbatches)


def vit_training(config: vit.ViTConfig, examples: int) -> Training:
    def loss_of(model: vit.ViT, batch: dict[str, jax.Array]) -> jax.Array:
        return vit.classification_loss(model(batch["image"], train=True), batch["label"])

    batch = images(examples, config.image_size, config.n_classes)
    return nnx_training(lambda: vit.ViT(config, rngs=nnx.Rngs(0)), loss_of, batch)


class StatisticsTrainState(TrainState):
    """With the running averages of BatchNorm."""

    statistics: Any = None


def next_token_training(model: nn.Module, vocab_size: int, length: int, examples: int) -> Training:
    """A Linen model of ``tokens -> logits``."""

    def create_params() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]

    def loss_of(params: Any, batch: jax.Array, _: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1])
        return gpt2.next_token_loss(logits, batch[:, 1:])

    return training(create_params, loss_of, tokens(examples, length, vocab_size))


def mixer_training(patches: int, width: int, layers: int, n_classes: int, examples: int) -> Training:
    def loss_of(model: SmallMixer, batch: dict[str, jax.Array]) -> jax.Array:
        return vit.classification_loss(model(batch["x"]), batch["label"])

    random = np.random.default_rng(0)
    batch = {
        "x": random.standard_normal((examples, patches, width), np.float32),
        "label": random.integers(0, n_classes, examples, np.int32),
    }
    return nnx_training(lambda: SmallMixer(patches, width, layers, n_classes, rngs=nnx.Rngs(0)), loss_of, batch)


def resnet_training(config: resnet.ResNetConfig, pixels: int, examples: int) -> Training:
    return image_training(resnet.ResNet(config), config.n_classes, pixels, examples)


def image_training(model: nn.Module, n_classes: int, pixels: int, examples: int) -> Training:
    """A Linen model with BatchNorm."""

    def create() -> StatisticsTrainState:
        variables = model.init(jax.random.key(0), jnp.zeros((1, pixels, pixels, 3)), train=False)
        return StatisticsTrainState.create(
            apply_fn=None, params=variables["params"], tx=OPTIMIZER, statistics=variables["batch_stats"]
        )

    def step(state: StatisticsTrainState, batch: dict[str, jax.Array]):
        def loss_of(params: Any):
            variables = {"params": params, "batch_stats": state.statistics}
            logits, changed = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
            return resnet.classification_loss(logits, batch["label"]), changed["batch_stats"]

        (loss, statistics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, statistics=statistics), loss

    return Training(create, step, images(examples, pixels, n_classes))


def tokens(examples: int, length: int, vocabulary: int) -> np.ndarray:
    """int32[examples, length + 1]: one token more than is predicted."""
    return np.random.default_rng(0).integers(0, vocabulary, (examples, length + 1), np.int32)


def images(examples: int, pixels: int, classes: int) -> dict[str, np.ndarray]:
    """``image`` float32[examples, pixels, pixels, 3] and ``label`` int32[examples]."""
    random = np.random.default_rng(0)
    return {
        "image": random.standard_normal((examples, pixels, pixels, 3), np.float32),
        "label": random.integers(0, classes, examples, np.int32),
    }
