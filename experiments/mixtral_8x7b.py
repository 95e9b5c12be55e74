"""Mixtral-8x7B in Flax NNX, its parameters and moments in bfloat16 so that they fit: one node of 8 H100s."""

import dataclasses

import jax.numpy as jnp

from experiments.language_models import mixtral
from jax_deepcompile.training import Data, Experiment, Optimizer, Train

CONFIG = Experiment(
    model=dataclasses.replace(mixtral.MIXTRAL_8X7B, param_dtype=jnp.bfloat16, capacity_factor=1.25, attention="cudnn"),
    data=Data(sequence_length=2048, batch_size=8),
    optimizer=Optimizer(learning_rate=1e-4),
    train=Train(steps=1000),
)
