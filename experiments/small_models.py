"""Small models written layer by layer, as textbooks and examples have them: many parameters, little work for each."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


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
    """A decoder with learned positions and biases everywhere; every layer has a name of its own.

    Its attention is Flax's, or written out as four Dense layers, as many tutorials have it.
    """

    vocab_size: int
    max_length: int
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    is_written_out: bool = False

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.d_model)(tokens_BxT)
        x = x + nn.Embed(self.max_length, self.d_model)(jnp.arange(tokens_BxT.shape[1]))[None]
        mask = nn.make_causal_mask(tokens_BxT)
        for _ in range(self.n_layers):
            h = nn.LayerNorm()(x)
            if self.is_written_out:
                x = x + self._attention(h)
            else:
                x = x + nn.MultiHeadDotProductAttention(self.n_heads)(h, mask=mask)
            x = x + nn.Dense(self.d_model)(nn.gelu(nn.Dense(4 * self.d_model)(nn.LayerNorm()(x))))
        return nn.Dense(self.vocab_size)(nn.LayerNorm()(x))

    def _attention(self, x_BxTxD: jax.Array) -> jax.Array:
        batch, length, width = x_BxTxD.shape
        q, k, v = (nn.Dense(width)(x_BxTxD).reshape(batch, length, self.n_heads, -1) for _ in range(3))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(width // self.n_heads)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshd->bthd", nn.softmax(scores), v).reshape(batch, length, width)
        return nn.Dense(width)(mixed)


class SmallLSTM(nn.Module):
    """A language model of LSTM layers, each a loop over the tokens."""

    vocab_size: int
    width: int = 128
    n_layers: int = 2

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x: Any = nn.Embed(self.vocab_size, self.width)(tokens_BxT)
        for _ in range(self.n_layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width))(x)
        return nn.Dense(self.vocab_size)(x)


class SmallMoE(nn.Module):
    """Layers of dense experts, mixed by a softmax gate; each expert is two Dense layers of its own."""

    vocab_size: int
    width: int = 64
    n_layers: int = 2
    n_experts: int = 4

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.width)(tokens_BxT)
        for _ in range(self.n_layers):
            h = nn.LayerNorm()(x)
            gates = nn.softmax(nn.Dense(self.n_experts)(h))
            made = [nn.Dense(self.width)(nn.relu(nn.Dense(4 * self.width)(h))) for _ in range(self.n_experts)]
            x = x + (jnp.stack(made, -1) * gates[..., None, :]).sum(-1)
        return nn.Dense(self.vocab_size)(nn.LayerNorm()(x))


class SmallMixer(nnx.Module):
    """A mixer of NNX layers over patches of features: one MLP across them, one within each."""

    def __init__(self, patches: int, width: int, n_layers: int, n_classes: int, *, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2 * n_layers)])
        sizes = [(patches, 2 * patches), (width, 4 * width)] * n_layers
        self.ups = nnx.List([nnx.Linear(narrow, wide, rngs=rngs) for narrow, wide in sizes])
        self.downs = nnx.List([nnx.Linear(wide, narrow, rngs=rngs) for narrow, wide in sizes])
        self.head = nnx.Linear(width, n_classes, rngs=rngs)

    def __call__(self, x_BxPxD: jax.Array) -> jax.Array:
        x = x_BxPxD
        for place, (norm, up, down) in enumerate(zip(self.norms, self.ups, self.downs, strict=True)):
            h = norm(x) if place % 2 else norm(x).swapaxes(1, 2)
            h = down(nnx.gelu(up(h)))
            x = x + (h if place % 2 else h.swapaxes(1, 2))
        return self.head(x.mean(1))
