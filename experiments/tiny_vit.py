"""A ViT of 70 thousand parameters, written in Flax NNX, that tells the directions of stripes."""

from experiments.images import Gratings, vit
from jax_deepcompile.training import Experiment, Optimizer, Train

CONFIG = Experiment(
    model=vit.VIT_TINY,
    data=Gratings(),
    optimizer=Optimizer(learning_rate=3e-3),
    train=Train(steps=100),
)
