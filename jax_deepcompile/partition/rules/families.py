"""All families of rules, registered by being imported."""

from jax_deepcompile.partition.rules import (
    contraction,
    control_flow,
    elementwise,
    indexing,
    kernels,
    linalg,
    manual,
    pallas,
    random,
    reduction,
    regions,
    scan,
    shape,
    sorting,
    windows,
)
from jax_deepcompile.partition.rules.registry import REGISTRY

__all__ = [
    "REGISTRY",
    "contraction",
    "control_flow",
    "elementwise",
    "indexing",
    "kernels",
    "linalg",
    "manual",
    "pallas",
    "random",
    "reduction",
    "regions",
    "scan",
    "shape",
    "sorting",
    "windows",
]
