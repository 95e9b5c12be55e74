"""Mixtral, a decoder-only language model with a sparse mixture of experts, in Flax NNX.

References:
  Mixtral of Experts (Jiang et al. 2024), https://arxiv.org/abs/2401.04088
  The balance loss: Switch Transformers, equations 4-6 (Fedus et al. 2021), https://arxiv.org/abs/2101.03961
    and its top-2, per-group form: GShard, algorithm 1 (Lepikhin et al. 2020), https://arxiv.org/abs/2006.16668
  Sorting tokens by expert instead of capping them: MegaBlocks (Gale et al. 2022), https://arxiv.org/abs/2211.15841
  Attention as in Mistral 7B (Jiang et al. 2023), https://arxiv.org/abs/2310.06825

Shapes are written in the names: x_BxTxD has the dimensions
  B batch    T tokens of a sequence    D model width    F feed-forward width    V vocabulary    L layers
  H query heads    K key/value heads    C channels of a head    R = C/2 rotated channel pairs
  E experts    A active experts of a token    S = T*A slots, one for each (token, active expert)
  N slots that an expert has room for, of one sequence
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.llama import causal_attention, rotary


@dataclass(frozen=True)
class MixtralConfig:
    """Sizes and numerics of one Mixtral.

    Attributes:
      vocab_size: tokens that there are.
      d_model: width of what layers hand on.
      n_layers: how many.
      n_heads: of queries.
      n_kv_heads: of keys and values, each for as many heads of queries.
      d_ff: width inside of each expert.
      n_experts: in each layer.
      n_active_experts: that each token goes to.
      rope_theta: base of the rotary embedding's wavelengths.
      norm_epsilon: added to variances under the root.
      init_std: standard deviation of new kernels.
      capacity_factor: room of an expert for slots of one sequence, over the T*A/E it gets when all get the same; slots
        beyond it are dropped, later tokens and second choices first. None drops nothing.
      balance_weight: what the balance loss is multiplied by in the training loss.
      param_dtype: dtype in which parameters are stored and updated.
      dtype: dtype of the activations and of the parameters as they enter a computation.
      remat_policy: what a layer saves for its backward pass, one of `jax.checkpoint_policies`; None saves everything.
      attention: implementation of `jax.nn.dot_product_attention`.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    n_experts: int
    n_active_experts: int
    capacity_factor: float | None = None
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    balance_weight: float = 0.02
    param_dtype: Any = jnp.float32
    dtype: Any = jnp.bfloat16
    remat_policy: Callable[..., Any] | None = jax.checkpoint_policies.nothing_saveable
    attention: Literal["xla", "cudnn"] = "xla"

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


# Table 1 of the Mixtral paper.
MIXTRAL_8X7B = MixtralConfig(
    vocab_size=32_000,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    d_ff=14_336,
    n_experts=8,
    n_active_experts=2,
)

# Reads raw bytes.
MIXTRAL_TINY = MixtralConfig(
    vocab_size=256,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=96,
    n_experts=4,
    n_active_experts=2,
    dtype=jnp.float32,
)


class Mixtral(nnx.Module):
    """Tokens in; float32 logits of each next token, and the balance loss averaged over layers, out."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.n_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_layers(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.d_model,
            embedding_init=nnx.initializers.normal(config.init_std),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.layers = stacked_layers(rngs)  # every parameter with a leading dimension L
        self.final_norm = _rms_norm(config, rngs)
        self.lm_head = _linear(config, config.d_model, config.vocab_size, rngs)

    def __call__(self, tokens_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
        def run(x_BxTxD: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array]:
            return layer(x_BxTxD)

        if self.config.remat_policy is not None:
            run = nnx.remat(run, policy=self.config.remat_policy, prevent_cse=False)  # a scan separates the two passes
        scan_layers = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        x_BxTxD, balance_L = scan_layers(self.embed(tokens_BxT), self.layers)

        logits_BxTxV = self.lm_head(self.final_norm(x_BxTxD))
        return logits_BxTxV.astype(jnp.float32), balance_L.mean()


class Layer(nnx.Module):
    """Attention and a mixture of experts, each on its own residual branch."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.experts_norm = _rms_norm(config, rngs)
        self.experts = MixtureOfExperts(config, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BxTxD += self.attention(self.attention_norm(x_BxTxD))
        y_BxTxD, balance = self.experts(self.experts_norm(x_BxTxD))
        return x_BxTxD + y_BxTxD, balance


class Attention(nnx.Module):
    """Causal self-attention in which H/K query heads share each key/value head."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.query = _linear(config, config.d_model, (config.n_heads, config.head_dim), rngs)
        self.key = _linear(config, config.d_model, (config.n_kv_heads, config.head_dim), rngs)
        self.value = _linear(config, config.d_model, (config.n_kv_heads, config.head_dim), rngs)
        self.out = _linear(config, (config.n_heads, config.head_dim), config.d_model, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        q_BxTxHxC = rotary(self.query(x_BxTxD), self.config.rope_theta)
        k_BxTxKxC = rotary(self.key(x_BxTxD), self.config.rope_theta)
        v_BxTxKxC = self.value(x_BxTxD)
        return self.out(causal_attention(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, self.config.attention))


class MixtureOfExperts(nnx.Module):
    """sum over the A best experts e of softmax(A best router logits)_e SwiGLU_e(x)."""

    def __init__(self, config: MixtralConfig, *, rngs: nnx.Rngs):
        def weights(*shape: int) -> nnx.Param:
            init = nnx.initializers.normal(config.init_std)
            return nnx.Param(init(rngs.params(), shape, config.param_dtype))

        self.config = config
        # The router stays in float32: Switch Transformers, section 2.4, selective precision.
        self.router = _linear(replace(config, dtype=jnp.float32), config.d_model, config.n_experts, rngs)
        self.gate_ExDxF = weights(config.n_experts, config.d_model, config.d_ff)
        self.up_ExDxF = weights(config.n_experts, config.d_model, config.d_ff)
        self.down_ExFxD = weights(config.n_experts, config.d_ff, config.d_model)

    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        cfg = self.config
        logits_BxTxE = self.router(x_BxTxD)
        best_BxTxA, chosen_BxTxA = jax.lax.top_k(logits_BxTxE, cfg.n_active_experts)
        share_BxTxA = jax.nn.softmax(best_BxTxA, axis=-1)

        gate_ExDxF, up_ExDxF, down_ExFxD = (
            w[...].astype(cfg.dtype) for w in (self.gate_ExDxF, self.up_ExDxF, self.down_ExFxD)
        )

        def one_sequence(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            x_TxD, chosen_TxA, share_TxA = inputs
            y_TxAxD = swiglu(x_TxD, chosen_TxA, gate_ExDxF, up_ExDxF, down_ExFxD)
            return jnp.einsum("tad,ta->td", y_TxAxD, share_TxA.astype(cfg.dtype))

        inputs = (x_BxTxD, chosen_BxTxA, share_BxTxA)
        if cfg.capacity_factor is not None:
            swiglu = partial(capped_swiglu, capacity=_capacity(cfg, cfg.capacity_factor, x_BxTxD.shape[1]))
            y_BxTxD = jax.vmap(one_sequence)(inputs)
        else:
            # A loop over sequences, as up to JAX 0.12 ragged_dot has no vmap that shares its weights, and XLA:GPU does
            # not compile the gradient of the ragged_dot_general that would stand for it.
            swiglu = grouped_swiglu
            y_BxTxD = jax.lax.map(one_sequence, inputs)
        return y_BxTxD, balance_loss(logits_BxTxE, chosen_BxTxA)


def grouped_swiglu(
    x_TxD: jax.Array, chosen_TxA: jax.Array, gate_ExDxF: jax.Array, up_ExDxF: jax.Array, down_ExFxD: jax.Array
) -> jax.Array:
    """Each token of one sequence through each of its chosen experts, as one matrix product per expert and weight."""
    (T, A), E = chosen_TxA.shape, gate_ExDxF.shape[0]
    expert_S = chosen_TxA.reshape(T * A)
    order_S = jnp.argsort(expert_S)  # slots in the order of their experts
    group_size_E = jax.nn.one_hot(expert_S, E, dtype=jnp.int32).sum(axis=0)

    x_SxD = x_TxD[order_S // A]
    gate_SxF = jax.lax.ragged_dot(x_SxD, gate_ExDxF, group_size_E)
    up_SxF = jax.lax.ragged_dot(x_SxD, up_ExDxF, group_size_E)
    y_SxD = jax.lax.ragged_dot(jax.nn.silu(gate_SxF) * up_SxF, down_ExFxD, group_size_E)
    return y_SxD[jnp.argsort(order_S)].reshape(T, A, -1)


def capped_swiglu(
    x_TxD: jax.Array,
    chosen_TxA: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
    capacity: int,
) -> jax.Array:
    """Each token of one sequence through each of its chosen experts that still has room; zeros from the others.

    First choices of all tokens come before second choices (GShard, algorithm 1). One batched matrix product a weight.
    """
    (T, A), E = chosen_TxA.shape, gate_ExDxF.shape[0]
    expert_S = chosen_TxA.T.reshape(A * T)
    before_SxE = jax.nn.one_hot(expert_S, E, dtype=jnp.int32).cumsum(axis=0) - 1
    place_S = jnp.take_along_axis(before_SxE, expert_S[:, None], axis=1)[:, 0]
    row_S = jnp.where(place_S < capacity, expert_S * capacity + place_S, E * capacity)  # the last means dropped

    token_S = jnp.tile(jnp.arange(T), A)
    token_EN = jnp.full(E * capacity, T).at[row_S].set(token_S, mode="drop")
    x_ExNxD = x_TxD.at[token_EN].get(mode="fill", fill_value=0).reshape(E, capacity, -1)
    gate_ExNxF = jnp.einsum("end,edf->enf", x_ExNxD, gate_ExDxF)
    up_ExNxF = jnp.einsum("end,edf->enf", x_ExNxD, up_ExDxF)
    y_ExNxD = jnp.einsum("enf,efd->end", jax.nn.silu(gate_ExNxF) * up_ExNxF, down_ExFxD)
    y_SxD = y_ExNxD.reshape(E * capacity, -1).at[row_S].get(mode="fill", fill_value=0)
    return y_SxD.reshape(A, T, -1).swapaxes(0, 1)


def balance_loss(logits_BxTxE: jax.Array, chosen_BxTxA: jax.Array) -> jax.Array:
    """E sum_e f_e P_e of each sequence, averaged; 1 when all experts get the same.

    f_e is the fraction of the sequence's slots that went to expert e, P_e its mean router probability.
    """
    E = logits_BxTxE.shape[-1]
    f_BxE = jax.nn.one_hot(chosen_BxTxA, E).mean(axis=(1, 2))
    P_BxE = jax.nn.softmax(logits_BxTxE, axis=-1).mean(axis=1)
    return E * (f_BxE * P_BxE).sum(axis=-1).mean()


def next_token_loss(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats; the target at t is the token at t + 1."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT).mean()


def _capacity(cfg: MixtralConfig, factor: float, T: int) -> int:
    return min(T, math.ceil(factor * T * cfg.n_active_experts / cfg.n_experts))


def _linear(
    cfg: MixtralConfig, inputs: int | tuple[int, int], outputs: int | tuple[int, int], rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    return nnx.LinearGeneral(
        inputs,
        outputs,
        axis=-1 if isinstance(inputs, int) else (-2, -1),
        use_bias=False,
        kernel_init=nnx.initializers.normal(cfg.init_std),
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        rngs=rngs,
    )


def _rms_norm(cfg: MixtralConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(cfg.d_model, epsilon=cfg.norm_epsilon, dtype=cfg.dtype, param_dtype=cfg.param_dtype, rngs=rngs)
