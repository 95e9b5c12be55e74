"""A Llama 3 of 107 thousand parameters, trained on bytes of Python's own library: half a minute on two CPU cores."""

from experiments.config import Data, Experiment, Optimizer, Train
from models.llama import LLAMA_TINY

CONFIG = Experiment(
    model=LLAMA_TINY,
    data=Data(sequence_length=64, batch_size=32),
    optimizer=Optimizer(learning_rate=1e-2),
    train=Train(steps=400),
)
