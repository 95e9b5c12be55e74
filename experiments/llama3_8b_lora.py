"""Adapters of rank 16 of Llama-3-8B, whose bfloat16 parameters stay as they are: one node of 8 H100s."""

import dataclasses

import jax.numpy as jnp

from experiments.language_models import llama
from jax_deepcompile.training import Data, Experiment, Optimizer, Train

CONFIG = Experiment(
    model=dataclasses.replace(llama.LLAMA3_8B, param_dtype=jnp.bfloat16, attention="cudnn", lora_rank=16),
    data=Data(sequence_length=4096, batch_size=8),
    optimizer=Optimizer(learning_rate=2e-4, weight_decay=0.0),
    train=Train(steps=1000),
)
