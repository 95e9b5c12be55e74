"""A mixer of the size of Mixer-B/16, of plain NNX layers in float32, on 224 x 224 pixels: 8 H100s."""

from experiments.images import MIXER_B16, Gratings
from jax_deepcompile.training import Experiment, Optimizer, Train

CONFIG = Experiment(
    model=MIXER_B16,
    data=Gratings(pixels=224, classes=1000, batch_size=512, held_out_examples=10_240),
    optimizer=Optimizer(learning_rate=1e-3),
    train=Train(steps=10_000, log_every_steps=50, checkpoint_every_steps=1000),
)
