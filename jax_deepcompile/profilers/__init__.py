"""Measuring a step and the machine it runs on: each file measures one thing into a ``Profile``."""

from jax_deepcompile.profilers.take import Taken, take_profile

__all__ = ["Taken", "take_profile"]
