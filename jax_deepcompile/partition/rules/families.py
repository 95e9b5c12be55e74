"""All families of rules, registered by being imported."""

from jax_deepcompile.partition.rules import (  # noqa: F401
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
    windows,
)
from jax_deepcompile.partition.rules.registry import REGISTRY  # noqa: F401
