"""Whole train steps, written plainly: forward, backward, global-norm clipping, AdamW, float32 master weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.host_memory import ACTIVATIONS_ON_HOST
from models import llama, mixtral

ADAMW = optax.adamw(3e-4)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)

Gradients = Callable[[TrainState, jax.Array], Any]


def create_state(model: Any, key: jax.Array, optimizer: optax.GradientTransformation = OPTIMIZER) -> TrainState:
    """Of a language model in Linen. Its attention has no parameters: where no cuDNN is, the state is made without."""
    plain = type(model)(dataclasses.replace(model.config, attention="xla"))
    params = plain.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def linen_gradients(by_hand: bool = False) -> Gradients:
    """Of ``(state, tokens)``, the state of a language model in Linen.

    Args:
      by_hand: whether parameters are cast to bfloat16 before the loss, as users do who tune for ``jax.jit``.
    """

    def gradients(state: TrainState, tokens: jax.Array):
        def loss_of(params):
            params = as_bfloat16(params) if by_hand else params
            return llama.next_token_loss(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

        return jax.value_and_grad(loss_of)(state.params)

    return gradients


def llama_gradients(
    config: llama.LlamaConfig, by_hand: bool, optimizer: optax.GradientTransformation = OPTIMIZER
) -> tuple[Gradients, Any]:
    """``(gradients of (state, tokens), abstract state)`` of a Llama."""
    create = partial(create_state, llama.Llama(config), optimizer=optimizer)
    abstract = jax.eval_shape(create, jax.random.key(0))
    return linen_gradients(by_hand), abstract


def mixtral_gradients(config: mixtral.MixtralConfig, by_hand: bool) -> tuple[Gradients, Any]:
    """As ``llama_gradients``, of a Mixtral, with its balance loss."""
    abstract = nnx.eval_shape(lambda: mixtral.Mixtral(config, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)

    def gradients(state: TrainState, tokens: jax.Array):
        def loss_of(params):
            params = as_bfloat16(params) if by_hand else params
            logits, balance = nnx.merge(graph, params, rest)(tokens[:, :-1])
            return mixtral.next_token_loss(logits, tokens[:, 1:]) + 0.02 * balance

        return jax.value_and_grad(loss_of)(state.params)

    def create(params):
        return TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)

    return gradients, jax.eval_shape(create, params)


def as_bfloat16(params: Any) -> Any:
    """The barrier keeps XLA from gathering first and converting then."""
    return lax.optimization_barrier(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))


# Experts with room for 1.25 even shares: the form that drops nothing, `ragged_dot`, computes every slot with every
# expert on XLA:GPU.
_MIXTRAL_8X7B = dataclasses.replace(mixtral.MIXTRAL_8X7B, capacity_factor=1.25)

_EIGHT_LAYERS = dataclasses.replace(llama.LLAMA3_8B, n_layers=8, scan_layers=False, remat_policy=None)

_CUDNN: dict[str, Any] = {"attention": "cudnn"}

_SAVED_7B = dataclasses.replace(llama.LLAMA2_7B, remat_policy=None, **_CUDNN)

_UNROLLED_7B = dataclasses.replace(_SAVED_7B, scan_layers=False)

_CUDNN_8B = dataclasses.replace(llama.LLAMA3_8B, **_CUDNN)

_CUDNN_70B = dataclasses.replace(llama.LLAMA3_70B, **_CUDNN)

# The sizes of https://huggingface.co/Qwen/Qwen3-14B/blob/main/config.json; its norms of queries and keys are left out.
_QWEN3_14B = dataclasses.replace(
    llama.LLAMA3_8B, vocab_size=151_936, d_model=5120, n_layers=40, n_heads=40, d_ff=17_408, **_CUDNN
)

MODELS: Mapping[str, Callable[[bool], tuple[Gradients, Any]]] = {
    "llama3_8b": lambda by_hand: llama_gradients(llama.LLAMA3_8B, by_hand),
    "llama3_8b_cudnn": lambda by_hand: llama_gradients(_CUDNN_8B, by_hand),
    "llama3_8b_cudnn_activations_on_host": lambda by_hand: llama_gradients(_on_host(_CUDNN_8B), by_hand),
    "llama3_8b_cudnn_unclipped": lambda by_hand: llama_gradients(_CUDNN_8B, by_hand, ADAMW),
    "llama3_8b_cudnn_unclipped_activations_on_host": lambda by_hand: llama_gradients(
        _on_host(_CUDNN_8B), by_hand, ADAMW
    ),
    "llama3_8b_8_unrolled": lambda by_hand: llama_gradients(_EIGHT_LAYERS, by_hand),
    "llama3_70b": lambda by_hand: llama_gradients(llama.LLAMA3_70B, by_hand),
    "llama3_70b_cudnn": lambda by_hand: llama_gradients(_CUDNN_70B, by_hand),
    "llama3_70b_cudnn_activations_on_host": lambda by_hand: llama_gradients(_on_host(_CUDNN_70B), by_hand),
    "qwen3_14b_cudnn": lambda by_hand: llama_gradients(_QWEN3_14B, by_hand),
    "qwen3_14b_cudnn_activations_on_host": lambda by_hand: llama_gradients(_on_host(_QWEN3_14B), by_hand),
    "llama2_7b_cudnn_saved": lambda by_hand: llama_gradients(_SAVED_7B, by_hand),
    "llama2_7b_cudnn_saved_unrolled": lambda by_hand: llama_gradients(_UNROLLED_7B, by_hand),
    "mixtral_8x7b": lambda by_hand: mixtral_gradients(_MIXTRAL_8X7B, by_hand),
    "mixtral_8x7b_cudnn": lambda by_hand: mixtral_gradients(dataclasses.replace(_MIXTRAL_8X7B, **_CUDNN), by_hand),
}
"""By name: whether parameters are cast by hand -> gradients and the abstract state."""


def _on_host(config: llama.LlamaConfig) -> llama.LlamaConfig:
    return dataclasses.replace(config, remat_policy=ACTIVATIONS_ON_HOST)


def constrained(step: Callable, mesh: Mesh) -> Callable:
    """``step`` with what every Linen module returns held to the batch's sharding, as users do who know GSPMD.

    Without that it gathers activations over the batch where the shards of a weight suggest so.
    """
    batch = NamedSharding(mesh, P(mesh.axis_names))

    def hold(next_call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        outputs = next_call(*args, **kwargs)
        if context.method_name != "__call__":
            return outputs
        return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, batch) if leaf.ndim > 2 else leaf, outputs)

    def held(*args):
        with nn.intercept_methods(hold):
            return step(*args)

    return held


LINEN = frozenset(name for name in MODELS if not name.startswith("mixtral"))
"""The models whose modules are Linen's."""


def accumulated(gradients: Gradients, microbatches: int, devices: int) -> Gradients:
    """Gradients summed over microbatches in a loop, as users write it: every device keeps its own examples."""
    if microbatches == 1:
        return gradients

    def summed(state: TrainState, tokens: jax.Array):
        parts = tokens.reshape(devices, microbatches, -1, tokens.shape[-1]).swapaxes(0, 1)

        def add(total, part):
            made = gradients(state, part.reshape(-1, tokens.shape[-1]))
            return jax.tree.map(jnp.add, total, made), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state.params)
        total, _ = lax.scan(add, (jnp.float32(0.0), zeros), parts)
        return jax.tree.map(lambda leaf: leaf / microbatches, total)

    return summed


def training_step(gradients: Gradients) -> Callable:
    """``(state, tokens) -> (state, loss)``."""

    def step(state: TrainState, tokens: jax.Array):
        loss, grads = gradients(state, tokens)
        return state.apply_gradients(grads=grads), loss

    return step
