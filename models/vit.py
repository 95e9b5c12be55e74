"""ViT, an image classifier of patches and attention, in Flax NNX with its layers unrolled.

References:
  An Image is Worth 16x16 Words (Dosovitskiy et al. 2020), https://arxiv.org/abs/2010.11929

Shapes are written in the names: x_BxTxD has the dimensions
  B batch    T = 1 + number of patches, tokens    D model width    F feed-forward width    N classes
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and numerics of one ViT.

    Attributes:
      image_size: height and width of the images in pixels, a multiple of `patch_size`.
      patch_size: height and width of a patch in pixels.
      n_classes: of images.
      d_model: width of what layers hand on.
      n_layers: how many.
      n_heads: of attention.
      d_ff: width inside of feed-forward networks.
      norm_epsilon: added to variances under the root.
      dropout_rate: of the embeddings, inside the feed-forward networks and of each residual branch.
      param_dtype: dtype in which parameters are stored and updated.
      dtype: dtype of the activations and of the parameters as they enter a computation.
    """

    image_size: int
    patch_size: int
    n_classes: int
    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    dropout_rate: float = 0.0
    norm_epsilon: float = 1e-6
    param_dtype: Any = jnp.float32
    dtype: Any = jnp.float32

    @property
    def n_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


# Table 1 of the paper, "Base" with 16x16 patches.
VIT_B16 = ViTConfig(image_size=224, patch_size=16, n_classes=1000, d_model=768, n_layers=12, n_heads=12, d_ff=3072)

VIT_TINY = ViTConfig(image_size=16, patch_size=4, n_classes=10, d_model=64, n_layers=2, n_heads=4, d_ff=128)


class ViT(nnx.Module):
    """RGB images in, float32 logits of their classes out."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patches = nnx.Conv(
            3,
            config.d_model,
            kernel_size=(config.patch_size, config.patch_size),
            strides=config.patch_size,
            padding="VALID",
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        init = nnx.initializers.normal(0.02)
        shape_1xTxD = (1, 1 + config.n_patches, config.d_model)
        self.position_1xTxD = nnx.Param(init(rngs.params(), shape_1xTxD, config.param_dtype))
        self.class_token_1x1xD = nnx.Param(jnp.zeros((1, 1, config.d_model), config.param_dtype))
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.n_layers)])
        self.final_norm = _layer_norm(config, rngs)
        self.head = _linear(config, config.d_model, config.n_classes, rngs)

    def __call__(self, images_BxHxWx3: jax.Array, *, train: bool = False) -> jax.Array:
        cfg = self.config
        x_BxHxWxD = self.patches(images_BxHxWx3.astype(cfg.dtype))
        B = x_BxHxWxD.shape[0]
        x_BxTxD = jnp.concatenate(
            [
                jnp.broadcast_to(self.class_token_1x1xD[...].astype(cfg.dtype), (B, 1, cfg.d_model)),
                x_BxHxWxD.reshape(B, cfg.n_patches, cfg.d_model),
            ],
            axis=1,
        )
        x_BxTxD = self.dropout(x_BxTxD + self.position_1xTxD[...].astype(cfg.dtype), deterministic=not train)
        for layer in self.layers:
            x_BxTxD = layer(x_BxTxD, train=train)
        logits_BxN = self.head(self.final_norm(x_BxTxD[:, 0, :]))
        return logits_BxN.astype(jnp.float32)


class Layer(nnx.Module):
    """Attention and a feed-forward network, each on its own residual branch, each normalised on its way in."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _layer_norm(config, rngs)
        self.attention = nnx.MultiHeadAttention(
            config.n_heads,
            config.d_model,
            decode=False,
            kernel_init=nnx.initializers.xavier_uniform(),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.mlp_norm = _layer_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array, *, train: bool) -> jax.Array:
        x_BxTxD += self.dropout(self.attention(self.attention_norm(x_BxTxD)), deterministic=not train)
        y_BxTxD = self.mlp(self.mlp_norm(x_BxTxD), train=train)
        return x_BxTxD + self.dropout(y_BxTxD, deterministic=not train)


class MLP(nnx.Module):
    """gelu(x W_up + b_up) W_down + b_down."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.up = _linear(config, config.d_model, config.d_ff, rngs)
        self.down = _linear(config, config.d_ff, config.d_model, rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array, *, train: bool) -> jax.Array:
        h_BxTxF = nnx.gelu(self.up(x_BxTxD), approximate=False)
        return self.down(self.dropout(h_BxTxF, deterministic=not train))


def classification_loss(logits_BxN: jax.Array, labels_B: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxN, labels_B).mean()


def _linear(cfg: ViTConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.xavier_uniform(),
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        rngs=rngs,
    )


def _layer_norm(cfg: ViTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(cfg.d_model, epsilon=cfg.norm_epsilon, dtype=cfg.dtype, param_dtype=cfg.param_dtype, rngs=rngs)
