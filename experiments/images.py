"""The repository's models of images, for ``deepcompile train``, and images that are drawn as they are asked for."""

import dataclasses
import math
import zlib
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from flax import nnx

from experiments.small_models import SmallMixer
from jax_deepcompile.training import ConfigError, Dataset, Model, build_model, check_sizes, load_data
from jax_deepcompile.training.config import AtLeastOne
from jax_deepcompile.training.model import Batch, Metrics
from jax_deepcompile.training.values import bounded
from models import vit


@dataclasses.dataclass(frozen=True)
class Gratings:
    """Noisy stripes on square images of three channels; the class is their direction. No file is read.

    Attributes:
        pixels: height and width of an image.
        classes: directions, at equal angles.
        batch_size: examples a step, on all devices together.
        noise: standard deviation of what is added to stripes between -1 and 1.
        training_examples: that there are.
        held_out_examples: others, which are not trained on.
        shuffle_seed: of the order of examples.
    """

    target: ClassVar[str] = "label"
    targets: ClassVar[int] = 1

    pixels: AtLeastOne = 16
    classes: Annotated[int, bounded(int, 2)] = 10
    batch_size: AtLeastOne = 64
    noise: float = 0.5
    training_examples: AtLeastOne = 100_000
    held_out_examples: AtLeastOne = 1000
    shuffle_seed: Annotated[int, bounded(int, 0, 2**32 - 1)] = 0


@dataclasses.dataclass(frozen=True)
class DrawnGratings:
    """A random-access source of ``{"inputs": f32[pixels, pixels, 3], "targets": i32[]}``."""

    config: Gratings
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        config, number = self.config, self.first + index
        random = np.random.default_rng(number)
        angle = math.pi * (number % config.classes) / config.classes
        y, x = np.mgrid[: config.pixels, : config.pixels] / config.pixels
        stripes = np.sin(
            2 * math.pi * random.uniform(2, 4) * (x * math.cos(angle) + y * math.sin(angle) + random.random())
        )
        noise = config.noise * random.standard_normal((config.pixels, config.pixels, 3))
        image = (stripes[:, :, None] + noise).astype(np.float32)
        return {"inputs": image, "targets": np.asarray(number % config.classes, np.int32)}


@load_data.register
def _gratings(config: Gratings) -> Dataset:
    for name in ("training_examples", "held_out_examples"):
        if getattr(config, name) < config.batch_size:
            raise ConfigError(
                f"data.{name}={getattr(config, name)}: must be at least data.batch_size={config.batch_size}"
            )
    training = DrawnGratings(config, 0, config.training_examples)
    held_out = DrawnGratings(config, config.training_examples, config.held_out_examples)
    summary = f"{config.training_examples:,} images of {config.classes} classes"
    return Dataset(training, held_out, summary, math.log(config.classes), zlib.crc32(repr(config).encode()))


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """Sizes of a ``SmallMixer`` over square patches.

    Attributes:
        patch_size: height and width of a patch in pixels.
        d_model: width of what layers hand on.
        n_layers: how many.
    """

    patch_size: int
    d_model: int
    n_layers: int


MIXER_TINY = MixerConfig(patch_size=4, d_model=32, n_layers=2)
MIXER_B16 = MixerConfig(patch_size=16, d_model=768, n_layers=12)


class ImageMixer(nnx.Module):
    """Images in, logits of their classes out."""

    def __init__(self, config: MixerConfig, data: Gratings, *, rngs: nnx.Rngs):
        patch = (config.patch_size, config.patch_size)
        patches = (data.pixels // config.patch_size) ** 2
        self.patches = nnx.Conv(3, config.d_model, patch, strides=patch, padding="VALID", rngs=rngs)
        self.mixer = SmallMixer(patches, config.d_model, config.n_layers, data.classes, rngs=rngs)

    def __call__(self, images_BxHxWx3: jax.Array, *, train: bool = False) -> jax.Array:
        x_BxHxWxD = self.patches(images_BxHxWx3)
        return self.mixer(x_BxHxWxD.reshape(x_BxHxWxD.shape[0], -1, x_BxHxWxD.shape[-1]))


@build_model.register
def _mixer(config: MixerConfig, data: Gratings) -> Model:
    check_sizes(config)
    if data.pixels % config.patch_size:
        raise ConfigError(f"model.patch_size={config.patch_size}: must divide data.pixels={data.pixels}")
    return _classifier(lambda key: ImageMixer(config, data, rngs=nnx.Rngs(key)))


@build_model.register
def _vit(config: vit.ViTConfig, data: Gratings) -> Model:
    check_sizes(config, divisions=(("image_size", "patch_size"), ("d_model", "n_heads")))
    for ours, theirs in (("image_size", "pixels"), ("n_classes", "classes")):
        if getattr(config, ours) != getattr(data, theirs):
            value = getattr(data, theirs)
            raise ConfigError(f"model.{ours}={getattr(config, ours)}: must be data.{theirs}={value}")
    return _classifier(lambda key: vit.ViT(config, rngs=nnx.Rngs(key)))


def _classifier(build: Any) -> Model:
    """Of an NNX model that is called with images and ``train``; its random streams stay as they are."""
    graph, _, rest = nnx.split(nnx.eval_shape(lambda: build(0)), nnx.Param, ...)

    def init(key: jax.Array) -> Any:
        return nnx.split(build(key), nnx.Param, ...)[1]

    def loss(params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        logits_BxN = nnx.merge(graph, params, rest)(batch["inputs"], train=dropout_key is not None)
        loss = vit.classification_loss(logits_BxN, batch["targets"])
        return loss, {"loss": loss}

    return Model(init, loss)
