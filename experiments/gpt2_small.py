"""GPT-2 (86 million parameters over bytes), pre-trained on a text of yours (`--data FILES`): 8 H100s."""

import dataclasses

import jax.numpy as jnp

from experiments.language_models import gpt2
from jax_deepcompile.training import Data, Experiment, Optimizer, Train

CONFIG = Experiment(
    model=dataclasses.replace(gpt2.GPT2_SMALL, vocab_size=256, dtype=jnp.bfloat16, attention="cudnn", scan_layers=True),
    data=Data(sequence_length=1024, batch_size=256, held_out_fraction=0.05),
    optimizer=Optimizer(learning_rate=6e-4),
    train=Train(steps=10_000, log_every_steps=50, checkpoint_every_steps=1000),
)
