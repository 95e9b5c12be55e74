"""A Llama 3 of 107 thousand parameters, trained on bytes of Python's own library: half a minute on two CPU cores."""

from experiments.language_models import llama
from jax_deepcompile.training import Data, Experiment, Optimizer, Train

CONFIG = Experiment(
    model=llama.LLAMA_TINY,
    data=Data(sequence_length=64, batch_size=32),
    optimizer=Optimizer(learning_rate=1e-2),
    train=Train(steps=400),
)
