"""All families of rules, registered by being imported."""

from jax_deepcompile.partition.rules import (
    contraction,
    control_flow,
    elementwise,
    random,
    reduction,
    regions,
    shape,
)
from jax_deepcompile.partition.rules.registry import REGISTRY

__all__ = ["REGISTRY", "contraction", "control_flow", "elementwise", "random", "reduction", "regions", "shape"]
