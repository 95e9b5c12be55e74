"""ResNet v1.5, a convolutional image classifier, in Flax Linen with BatchNorm.

References:
  Deep Residual Learning for Image Recognition (He et al. 2015), https://arxiv.org/abs/1512.03385
  v1.5 strides in the 3x3 convolution of a bottleneck instead of the first 1x1:
    https://catalog.ngc.nvidia.com/orgs/nvidia/resources/resnet_50_v1_5_for_pytorch
  Last BatchNorm scale of each block starts at zero (Goyal et al. 2017), https://arxiv.org/abs/1706.02677

Shapes are written in the names: x_BxHxWxC has the dimensions
  B batch    H height    W width    C channels    N classes
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes and numerics of one ResNet.

    Attributes:
      n_blocks: bottleneck blocks in each stage; each stage but the first halves height and width.
      width: channels inside the first stage's bottlenecks; they double with each stage.
      n_classes: of images.
      norm_epsilon: added to variances under the root.
      norm_momentum: weight of the past in BatchNorm's running averages.
      param_dtype: dtype in which parameters are stored and updated.
      dtype: dtype of the activations and of the parameters as they enter a computation.
    """

    n_blocks: tuple[int, ...]
    width: int
    n_classes: int
    norm_momentum: float = 0.9
    norm_epsilon: float = 1e-5
    param_dtype: Any = jnp.float32
    dtype: Any = jnp.float32


# Table 1 of the paper.
RESNET50 = ResNetConfig(n_blocks=(3, 4, 6, 3), width=64, n_classes=1000)

RESNET_TINY = ResNetConfig(n_blocks=(1, 1), width=8, n_classes=10)

EXPANSION = 4  # channels a bottleneck puts out for each that it has inside


class ResNet(nn.Module):
    """RGB images in, float32 logits of their classes out.

    With `train`, normalises by the batch's own statistics and updates the collection "batch_stats".
    """

    config: ResNetConfig

    @nn.compact
    def __call__(self, images_BxHxWx3: jax.Array, *, train: bool = False) -> jax.Array:
        cfg = self.config
        x_BxHxWxC = _conv(cfg, cfg.width, kernel=7, stride=2, name="stem")(images_BxHxWx3.astype(cfg.dtype))
        x_BxHxWxC = nn.relu(_norm(cfg, train, "stem_norm")(x_BxHxWxC))
        one_each_side: Any = ((1, 1), (1, 1))  # flax takes pairs, though it declares a str
        x_BxHxWxC = nn.max_pool(x_BxHxWxC, (3, 3), strides=(2, 2), padding=one_each_side)
        for stage, n_blocks in enumerate(cfg.n_blocks):
            for i in range(n_blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                block = Bottleneck(cfg, cfg.width * 2**stage, stride, name=f"stage_{stage}_block_{i}")
                x_BxHxWxC = block(x_BxHxWxC, train=train)
        x_BxC = x_BxHxWxC.mean(axis=(1, 2))
        logits_BxN = nn.Dense(cfg.n_classes, dtype=cfg.dtype, param_dtype=cfg.param_dtype, name="head")(x_BxC)
        return logits_BxN.astype(jnp.float32)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is a projection where the shape changes."""

    config: ResNetConfig
    width: int
    stride: int

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array, *, train: bool) -> jax.Array:
        cfg = self.config
        width_out = self.width * EXPANSION

        y_BxHxWxC = _conv(cfg, self.width, kernel=1, name="conv_1")(x_BxHxWxC)
        y_BxHxWxC = nn.relu(_norm(cfg, train, "norm_1")(y_BxHxWxC))
        y_BxHxWxC = _conv(cfg, self.width, kernel=3, stride=self.stride, name="conv_2")(y_BxHxWxC)
        y_BxHxWxC = nn.relu(_norm(cfg, train, "norm_2")(y_BxHxWxC))
        y_BxHxWxC = _conv(cfg, width_out, kernel=1, name="conv_3")(y_BxHxWxC)
        y_BxHxWxC = _norm(cfg, train, "norm_3", scale_init=nn.initializers.zeros)(y_BxHxWxC)

        if x_BxHxWxC.shape != y_BxHxWxC.shape:
            x_BxHxWxC = _conv(cfg, width_out, kernel=1, stride=self.stride, name="conv_shortcut")(x_BxHxWxC)
            x_BxHxWxC = _norm(cfg, train, "norm_shortcut")(x_BxHxWxC)
        return nn.relu(x_BxHxWxC + y_BxHxWxC)


def classification_loss(logits_BxN: jax.Array, labels_B: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxN, labels_B).mean()


def _conv(cfg: ResNetConfig, features: int, *, kernel: int, stride: int = 1, name: str) -> nn.Conv:
    return nn.Conv(
        features,
        (kernel, kernel),
        strides=stride,
        padding=kernel // 2,
        use_bias=False,
        kernel_init=nn.initializers.he_normal(),
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        name=name,
    )


def _norm(cfg: ResNetConfig, train: bool, name: str, scale_init=nn.initializers.ones) -> nn.BatchNorm:
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=cfg.norm_momentum,
        epsilon=cfg.norm_epsilon,
        scale_init=scale_init,
        dtype=cfg.dtype,
        param_dtype=cfg.param_dtype,
        name=name,
    )
