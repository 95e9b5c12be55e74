"""A Mixtral of four experts, written in Flax NNX, trained on bytes of Python's own library."""

from experiments.language_models import mixtral
from jax_deepcompile.training import Data, Experiment, Optimizer, Train

CONFIG = Experiment(
    model=mixtral.MIXTRAL_TINY,
    data=Data(sequence_length=64, batch_size=32),
    optimizer=Optimizer(learning_rate=1e-2),
    train=Train(steps=60),
)
