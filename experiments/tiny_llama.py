"""A Llama 3 of half a million parameters that learns bytes of Python in about a minute on two CPU cores."""

import dataclasses

from experiments.config import Data, Experiment, Train
from models.llama import LLAMA_TINY

CONFIG = Experiment(model=LLAMA_TINY, data=Data(), train=Train())
