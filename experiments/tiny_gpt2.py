"""A GPT-2 of 120 thousand parameters with dropout and unrolled layers, trained on bytes of Python's own library."""

from experiments.config import Data, Experiment, Optimizer, Train
from models.gpt2 import GPT2_TINY

CONFIG = Experiment(
    model=GPT2_TINY,
    data=Data(sequence_length=64, batch_size=32),
    optimizer=Optimizer(learning_rate=1e-2),
    train=Train(steps=400),
)
