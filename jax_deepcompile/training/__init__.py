"""What ``deepcompile train`` does with a typed config, and what a config of one's own is made of.

    CONFIG = Experiment(model=MyConfig(), data=Data(sequence_length=64), train=Train(steps=100))

A model joins by a function of its config that is registered with ``build_model``, data by one registered with
``load_data``.
"""

from jax_deepcompile.training.config import ConfigError, Data, Experiment, Mesh, Optimizer, Train
from jax_deepcompile.training.data import Dataset, load_data
from jax_deepcompile.training.model import Model, build_model, check_sizes

__all__ = [
    "ConfigError",
    "Data",
    "Dataset",
    "Experiment",
    "Mesh",
    "Model",
    "Optimizer",
    "Train",
    "build_model",
    "check_sizes",
    "load_data",
]
