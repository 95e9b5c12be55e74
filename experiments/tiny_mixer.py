"""A mixer of NNX layers that tells the directions of stripes."""

from experiments.images import MIXER_TINY, Gratings
from jax_deepcompile.training import Experiment, Optimizer, Train

CONFIG = Experiment(
    model=MIXER_TINY,
    data=Gratings(),
    optimizer=Optimizer(learning_rate=1e-2),
    train=Train(steps=100),
)
