"""Llama-3-70B, float32 parameters and moments, bfloat16 products: four nodes of 8 H100s."""

import dataclasses

from experiments.language_models import llama
from jax_deepcompile.training import Data, Experiment, Optimizer, Train

CONFIG = Experiment(
    model=dataclasses.replace(llama.LLAMA3_70B, attention="cudnn"),
    data=Data(sequence_length=4096, batch_size=32),
    optimizer=Optimizer(learning_rate=1.5e-4),
    train=Train(steps=1000),
)
