"""A GPT-2 of 120 thousand parameters with dropout and unrolled layers, trained on bytes of Python's own library."""

from experiments.language_models import gpt2
from jax_deepcompile.training import Data, Experiment, Optimizer, Train

CONFIG = Experiment(
    model=gpt2.GPT2_TINY,
    data=Data(sequence_length=64, batch_size=32),
    optimizer=Optimizer(learning_rate=1e-2),
    train=Train(steps=400),
)
