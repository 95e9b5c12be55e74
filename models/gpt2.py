"""GPT-2, a decoder-only language model, in Flax Linen, with its layers one by one or stacked and scanned.

References:
  Language Models are Unsupervised Multitask Learners (Radford et al. 2019),
    https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
  The released code and weights, https://github.com/openai/gpt-2
  GELU and its tanh form (Hendrycks & Gimpel 2016), https://arxiv.org/abs/1606.08415
  MPT, the same architecture at larger sizes, https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/yamls/pretrain

Shapes are written in the names: x_BxTxD has the dimensions
  B batch    T tokens of a sequence    D model width    F feed-forward width    V vocabulary
  H heads    C channels of a head
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class GPT2Config:
    """Sizes and numerics of one GPT-2.

    Attributes:
      vocab_size: tokens that there are.
      d_model: width of what layers hand on.
      n_layers: how many.
      n_heads: of attention.
      max_length: most tokens a sequence may have; each position has its own learned vector.
      dropout_rate: of the embeddings, the attention weights and each residual branch.
      norm_epsilon: added to variances under the root.
      init_std: standard deviation of new kernels.
      param_dtype: dtype in which parameters are stored and updated.
      dtype: dtype of the activations and of the parameters as they enter a computation.
      remat_policy: what a layer saves for its backward pass, one of `jax.checkpoint_policies`; None saves everything
        without any `jax.checkpoint`.
      scan_layers: one loop over stacked layers; else layer after layer, each with parameters of its own.
      attention: "xla", or "cudnn": `jax.nn.dot_product_attention` by cuDNN, which drops no attention weights.
    """

    vocab_size: int
    max_length: int
    d_model: int
    n_layers: int
    n_heads: int
    dropout_rate: float = 0.1
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    param_dtype: Any = jnp.float32
    dtype: Any = jnp.float32
    remat_policy: Callable[..., Any] | None = None
    scan_layers: bool = False
    attention: Literal["xla", "cudnn"] = "xla"

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def d_ff(self) -> int:
        return 4 * self.d_model


GPT2_SMALL = GPT2Config(vocab_size=50_257, max_length=1024, d_model=768, n_layers=12, n_heads=12)

# llm-foundry's mpt-7b.yaml, mpt-13b.yaml, mpt-30b.yaml and mpt-70b.yaml.
MPT_7B = GPT2Config(
    vocab_size=50_368,
    max_length=2048,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    dropout_rate=0.0,
    dtype=jnp.bfloat16,
    scan_layers=True,
    attention="cudnn",
)
MPT_13B = replace(MPT_7B, d_model=5120, n_layers=40, n_heads=40)
MPT_30B = replace(MPT_7B, d_model=7168, n_layers=48, n_heads=56)
MPT_70B = replace(MPT_7B, d_model=8192, n_layers=80, n_heads=64)

# Reads raw bytes.
GPT2_TINY = GPT2Config(vocab_size=256, max_length=64, d_model=64, n_layers=2, n_heads=4)


class GPT2(nn.Module):
    """Tokens in, float32 logits of each next token out. With `train`, needs the random stream "dropout"."""

    config: GPT2Config

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, *, train: bool = False) -> jax.Array:
        cfg = self.config
        embed = _embed(cfg, cfg.vocab_size, "token_embed")  # also the output layer
        x_1xTxD = _embed(cfg, cfg.max_length, "position_embed")(jnp.arange(tokens_BxT.shape[1]))[None, :, :]
        x_BxTxD = nn.Dropout(cfg.dropout_rate, deterministic=not train)(embed(tokens_BxT) + x_1xTxD)
        layer = Layer
        if cfg.remat_policy is not None:
            layer = nn.remat(Layer, policy=cfg.remat_policy, prevent_cse=not cfg.scan_layers)
        if cfg.scan_layers:
            layers = nn.scan(
                layer,
                length=cfg.n_layers,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
            )
            x_BxTxD, _ = layers(cfg, train, name="layers")(x_BxTxD)
        else:
            for i in range(cfg.n_layers):
                x_BxTxD, _ = layer(cfg, train, name=f"layer_{i}")(x_BxTxD)
        x_BxTxD = _layer_norm(cfg, "final_norm")(x_BxTxD)
        return embed.attend(x_BxTxD).astype(jnp.float32)


class Layer(nn.Module):
    """Attention and a feed-forward network, each on its own residual branch, each normalised on its way in.

    In the (carry in, carry out) form of a scan.
    """

    config: GPT2Config
    train: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, None]:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout_rate, deterministic=not self.train)
        y_BxTxD = Attention(cfg, name="attention")(_layer_norm(cfg, "attention_norm")(x_BxTxD), train=self.train)
        x_BxTxD += dropout(y_BxTxD)
        y_BxTxD = MLP(cfg, name="mlp")(_layer_norm(cfg, "mlp_norm")(x_BxTxD))
        return x_BxTxD + dropout(y_BxTxD), None


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, *, train: bool) -> jax.Array:
        cfg = self.config
        q_BxTxHxC, k_BxTxHxC, v_BxTxHxC = (
            _linear(cfg, (cfg.n_heads, cfg.head_dim), name)(x_BxTxD) for name in ("query", "key", "value")
        )
        if cfg.attention == "cudnn":
            y_BxTxHxC = jax.nn.dot_product_attention(
                q_BxTxHxC, k_BxTxHxC, v_BxTxHxC, is_causal=True, implementation="cudnn"
            )
        else:
            T = x_BxTxD.shape[1]
            y_BxTxHxC = nn.dot_product_attention(
                q_BxTxHxC,
                k_BxTxHxC,
                v_BxTxHxC,
                mask=jnp.tril(jnp.ones((1, 1, T, T), dtype=bool)),
                dropout_rng=self.make_rng("dropout") if train and cfg.dropout_rate > 0 else None,
                dropout_rate=cfg.dropout_rate,
                broadcast_dropout=False,
                deterministic=not train,
                dtype=cfg.dtype,
            )
        return _linear(cfg, cfg.d_model, "out", axis=(-2, -1), residual=True)(y_BxTxHxC)


class MLP(nn.Module):
    """gelu(x W_up + b_up) W_down + b_down."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        cfg = self.config
        h_BxTxF = nn.gelu(_linear(cfg, cfg.d_ff, "up")(x_BxTxD), approximate=True)
        return _linear(cfg, cfg.d_model, "down", residual=True)(h_BxTxF)


def next_token_loss(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats; the target at t is the token at t + 1."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT).mean()


def _embed(cfg: GPT2Config, rows: int, name: str) -> nn.Embed:
    return nn.Embed(
        rows,
        cfg.d_model,
        embedding_init=nn.initializers.normal(cfg.init_std),
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        name=name,
    )


def _linear(
    cfg: GPT2Config,
    features: int | tuple[int, int],
    name: str,
    *,
    axis: int | tuple[int, int] = -1,
    residual: bool = False,
) -> nn.DenseGeneral:
    # Section 2.3 of the paper: what adds to the residual stream starts smaller by the square root of how many do.
    std = cfg.init_std / (2 * cfg.n_layers) ** 0.5 if residual else cfg.init_std
    return nn.DenseGeneral(
        features,
        axis=axis,
        kernel_init=nn.initializers.normal(std),
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        name=name,
    )


def _layer_norm(cfg: GPT2Config, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=cfg.norm_epsilon, dtype=cfg.dtype, param_dtype=cfg.param_dtype, name=name)
