"""Adapters of rank 8 of a tiny Llama that is trained already (`--train.base RUN`) and stays as it is."""

import dataclasses

from experiments.language_models import llama
from jax_deepcompile.training import Data, Experiment, Optimizer, Train

CONFIG = Experiment(
    model=dataclasses.replace(llama.LLAMA_TINY, lora_rank=8),
    data=Data(sequence_length=64, batch_size=32),
    optimizer=Optimizer(learning_rate=1e-2, weight_decay=0.0),
    train=Train(steps=200),
)
