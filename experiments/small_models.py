"""Small models written layer by layer, as textbooks and examples have them: many parameters, little work for each."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class SmallResNet(nn.Module):
    """The ResNet for CIFAR-10 of He et al. (2015), section 4.2: ``6 * blocks + 2`` layers.

    Its shortcuts are projections where the number of channels changes.
    """

    blocks: int = 3
    widths: tuple[int, ...] = (16, 32, 64)
    n_classes: int = 10

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.BatchNorm(not train)(nn.Conv(self.widths[0], (3, 3), use_bias=False)(x_BxHxWxC)))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                strides = (2, 2) if stage and not block else (1, 1)
                shortcut = x if strides == (1, 1) else nn.Conv(width, (1, 1), strides, use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(not train)(nn.Conv(width, (3, 3), strides, use_bias=False)(x)))
                x = nn.BatchNorm(not train)(nn.Conv(width, (3, 3), use_bias=False)(x))
                x = nn.relu(x + shortcut)
        return nn.Dense(self.n_classes)(x.mean((1, 2)))


class SmallTransformer(nn.Module):
    """A decoder with Flax's own attention, learned positions, biases everywhere; every layer has a name of its own."""

    vocab_size: int
    max_length: int
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.d_model)(tokens_BxT)
        x = x + nn.Embed(self.max_length, self.d_model)(jnp.arange(tokens_BxT.shape[1]))[None]
        mask = nn.make_causal_mask(tokens_BxT)
        for _ in range(self.n_layers):
            x = x + nn.MultiHeadDotProductAttention(self.n_heads)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(self.d_model)(nn.gelu(nn.Dense(4 * self.d_model)(nn.LayerNorm()(x))))
        return nn.Dense(self.vocab_size)(nn.LayerNorm()(x))
