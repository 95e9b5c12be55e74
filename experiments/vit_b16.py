"""ViT-B/16 in Flax NNX on images of 224 x 224 pixels: 8 H100s."""

import dataclasses

import jax.numpy as jnp

from experiments.images import Gratings, vit
from jax_deepcompile.training import Experiment, Optimizer, Train

CONFIG = Experiment(
    model=dataclasses.replace(vit.VIT_B16, dtype=jnp.bfloat16),
    data=Gratings(pixels=224, classes=1000, batch_size=1024, held_out_examples=10_240),
    optimizer=Optimizer(learning_rate=1e-3),
    train=Train(steps=10_000, log_every_steps=50, checkpoint_every_steps=1000),
)
