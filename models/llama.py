"""Llama, a decoder-only language model, in Flax Linen, with its layers stacked and scanned or one by one.

References:
  The Llama 3 Herd of Models (Grattafiori et al. 2024), https://arxiv.org/abs/2407.21783
  Llama 2 (Touvron et al. 2023), https://arxiv.org/abs/2307.09288
  RoPE, rotary positions (Su et al. 2021), https://arxiv.org/abs/2104.09864
  Grouped-query attention (Ainslie et al. 2023), https://arxiv.org/abs/2305.13245
  SwiGLU (Shazeer 2020), https://arxiv.org/abs/2002.05202
  RMSNorm (Zhang & Sennrich 2019), https://arxiv.org/abs/1910.07467
  LoRA (Hu et al. 2021), https://arxiv.org/abs/2106.09685

Shapes are written in the names: x_BxTxD has the dimensions
  B batch    T tokens of a sequence    D model width    F feed-forward width    V vocabulary
  H query heads    K key/value heads    C channels of a head    R = C/2 rotated channel pairs
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and numerics of one Llama.

    Attributes:
      vocab_size: tokens that there are.
      d_model: width of what layers hand on.
      n_layers: how many.
      n_heads: of queries.
      n_kv_heads: of keys and values, each for as many heads of queries.
      d_ff: width inside of feed-forward networks.
      rope_theta: base of the rotary embedding's wavelengths.
      norm_epsilon: added to variances under the root.
      init_std: standard deviation of new kernels.
      param_dtype: dtype in which parameters are stored and updated.
      dtype: dtype of the activations and of the parameters as they enter a computation.
      remat_policy: what a layer saves for its backward pass, one of `jax.checkpoint_policies`; None saves everything.
        `save_only_these_names`, which a config in Python may have, knows query, key, value (rotated), context, out,
        gate, up and down, which are what the layer's linear maps and its attention return.
      logits_dtype: dtype in which the last product is computed; as all others if None.
      scan_layers: one loop over stacked layers; else layer after layer, each with parameters of its own.
      attention: implementation of `jax.nn.dot_product_attention`.
      lora_rank: of the product, of float32 parameters `lora_a` and `lora_b`, that each linear map of a layer has beside
        its kernel; 0 is none. Whoever trains decides that nothing else is trained.
      lora_scale: what that product is multiplied by.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    param_dtype: Any = jnp.float32
    dtype: Any = jnp.bfloat16
    remat_policy: Callable[..., Any] | None = jax.checkpoint_policies.nothing_saveable
    logits_dtype: type | None = None
    scan_layers: bool = True
    attention: Literal["xla", "cudnn"] = "xla"
    lora_rank: int = 0
    lora_scale: float = 2.0

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


# Tables 1 and 3 of the Llama 2 paper and Llama 2's configuration files.
LLAMA2_7B = LlamaConfig(
    vocab_size=32_000, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, d_ff=11_008, rope_theta=10_000.0
)
LLAMA2_13B = replace(LLAMA2_7B, d_model=5120, n_layers=40, n_heads=40, n_kv_heads=40, d_ff=13_824)
LLAMA2_70B = replace(LLAMA2_7B, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, d_ff=28_672)

# Table 3 of the Llama 3 paper.
LLAMA3_8B = LlamaConfig(vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=14_336)
LLAMA3_70B = LlamaConfig(vocab_size=128_256, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, d_ff=28_672)

# Reads raw bytes.
LLAMA_TINY = LlamaConfig(vocab_size=256, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=128, dtype=jnp.float32)


class Llama(nn.Module):
    """Tokens in, float32 logits of each next token out."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        cfg = self.config
        embed = nn.Embed(
            cfg.vocab_size,
            cfg.d_model,
            embedding_init=nn.initializers.normal(cfg.init_std),
            dtype=cfg.dtype,
            param_dtype=cfg.param_dtype,
            name="embed",
        )
        layer, x_BxTxD = Layer, embed(tokens_BxT)
        if cfg.remat_policy is not None:
            # A scan separates the two passes; layers one by one must be kept from being merged with their repetition.
            layer = nn.remat(Layer, policy=cfg.remat_policy, prevent_cse=not cfg.scan_layers)
        if cfg.scan_layers:
            layers = nn.scan(layer, length=cfg.n_layers, variable_axes={"params": 0}, split_rngs={"params": True})
            x_BxTxD, _ = layers(cfg, name="layers")(x_BxTxD)
        else:
            for i in range(cfg.n_layers):
                x_BxTxD, _ = layer(cfg, name=f"layer_{i}")(x_BxTxD)
        x_BxTxD = _rms_norm(cfg, "final_norm")(x_BxTxD)
        head = replace(cfg, dtype=cfg.logits_dtype or cfg.dtype, lora_rank=0)
        logits_BxTxV = _linear(head, cfg.vocab_size, "lm_head")(x_BxTxD)
        return logits_BxTxV.astype(jnp.float32)


class Layer(nn.Module):
    """One layer, in the (carry in, carry out) form of a scan."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, None]:
        cfg = self.config
        x_BxTxD += Attention(cfg, name="attention")(_rms_norm(cfg, "attention_norm")(x_BxTxD))
        x_BxTxD += SwiGLU(cfg, name="mlp")(_rms_norm(cfg, "mlp_norm")(x_BxTxD))
        return x_BxTxD, None


class Attention(nn.Module):
    """Causal self-attention in which H/K query heads share each key/value head."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        cfg = self.config
        q_BxTxHxC = _linear(cfg, (cfg.n_heads, cfg.head_dim), "query")(x_BxTxD)
        k_BxTxKxC = _linear(cfg, (cfg.n_kv_heads, cfg.head_dim), "key")(x_BxTxD)
        v_BxTxKxC = _linear(cfg, (cfg.n_kv_heads, cfg.head_dim), "value")(x_BxTxD)
        q_BxTxHxC = checkpoint_name(rotary(q_BxTxHxC, cfg.rope_theta), "query")
        k_BxTxKxC = checkpoint_name(rotary(k_BxTxKxC, cfg.rope_theta), "key")
        v_BxTxKxC = checkpoint_name(v_BxTxKxC, "value")
        y_BxTxHxC = checkpoint_name(causal_attention(q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, cfg.attention), "context")
        return checkpoint_name(_linear(cfg, cfg.d_model, "out", axis=(-2, -1))(y_BxTxHxC), "out")


class SwiGLU(nn.Module):
    """(silu(x W_gate) * x W_up) W_down."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        cfg = self.config
        gate_BxTxF = checkpoint_name(_linear(cfg, cfg.d_ff, "gate")(x_BxTxD), "gate")
        up_BxTxF = checkpoint_name(_linear(cfg, cfg.d_ff, "up")(x_BxTxD), "up")
        return checkpoint_name(_linear(cfg, cfg.d_model, "down")(nn.silu(gate_BxTxF) * up_BxTxF), "down")


def rotary(x_BxTxHxC: jax.Array, theta: float) -> jax.Array:
    """Turns the channel pair (r, r + C/2) of the token at t by the angle t theta^(-2r/C)."""
    T, C = x_BxTxHxC.shape[1], x_BxTxHxC.shape[3]
    frequency_R = theta ** (-jnp.arange(0, C, 2, dtype=jnp.float32) / C)
    angle_TxR = jnp.arange(T, dtype=jnp.float32)[:, None] * frequency_R[None, :]
    sin_1xTx1xR, cos_1xTx1xR = jnp.sin(angle_TxR)[None, :, None, :], jnp.cos(angle_TxR)[None, :, None, :]
    a_BxTxHxR, b_BxTxHxR = jnp.split(x_BxTxHxC.astype(jnp.float32), 2, axis=-1)
    turned_BxTxHxC = jnp.concatenate(
        [
            a_BxTxHxR * cos_1xTx1xR - b_BxTxHxR * sin_1xTx1xR,
            b_BxTxHxR * cos_1xTx1xR + a_BxTxHxR * sin_1xTx1xR,
        ],
        axis=-1,
    )
    return turned_BxTxHxC.astype(x_BxTxHxC.dtype)


def causal_attention(
    q_BxTxHxC: jax.Array, k_BxTxKxC: jax.Array, v_BxTxKxC: jax.Array, implementation: Literal["xla", "cudnn"]
) -> jax.Array:
    """softmax(q k / sqrt(C)) v over the tokens up to each one."""
    if implementation == "cudnn":
        return jax.nn.dot_product_attention(
            q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, is_causal=True, implementation=implementation
        )
    # A mask that is added keeps its size. A boolean one is broadcast to every sequence and head, and a scan over
    # layers hoists that out of its loop: 1.3 GB for each sequence of 2048 tokens and 64 heads.
    T = q_BxTxHxC.shape[1]
    mask_TxT = jnp.where(jnp.tril(jnp.ones((T, T), dtype=bool)), 0.0, -jnp.inf)
    return jax.nn.dot_product_attention(
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, bias=mask_TxT[None, None, :, :], implementation=implementation
    )


def next_token_loss(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats; the target at t is the token at t + 1."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT).mean()


class AdaptedLinear(nn.Module):
    """y = x W + s (x A) B, where A has few columns and B begins as zeros."""

    config: LlamaConfig
    features: tuple[int, ...]
    axes: int  # of x, the last, that are mapped

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        inputs, axis = x.shape[x.ndim - self.axes :], tuple(range(-self.axes, 0))
        dense = _dense(cfg, self.features, axis, None)
        nn.share_scope(self, dense)  # its kernel lies where it does without adapters
        y = dense(x)
        a = self.param("lora_a", nn.initializers.normal(cfg.init_std), (*inputs, cfg.lora_rank), jnp.float32)
        b = self.param("lora_b", nn.initializers.zeros, (cfg.lora_rank, *self.features), jnp.float32)
        few = jnp.tensordot(x, a.astype(cfg.dtype), self.axes)
        return y + cfg.lora_scale * jnp.tensordot(few, b.astype(cfg.dtype), 1)


def _linear(
    cfg: LlamaConfig, features: int | tuple[int, int], name: str, axis: int | tuple[int, int] = -1
) -> nn.Module:
    if not cfg.lora_rank:
        return _dense(cfg, features, axis, name)
    several = features if isinstance(features, tuple) else (features,)
    return AdaptedLinear(cfg, several, len(axis) if isinstance(axis, tuple) else 1, name=name)


def _dense(
    cfg: LlamaConfig, features: int | tuple[int, ...], axis: int | tuple[int, ...], name: str | None
) -> nn.DenseGeneral:
    return nn.DenseGeneral(
        features,
        axis=axis,
        use_bias=False,
        kernel_init=nn.initializers.normal(cfg.init_std),
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        name=name,
    )


def _rms_norm(cfg: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=cfg.norm_epsilon, dtype=cfg.dtype, param_dtype=cfg.param_dtype, name=name)
