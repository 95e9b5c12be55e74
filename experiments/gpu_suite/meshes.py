"""The mesh of what runs on one device."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh


def one_device_mesh() -> Mesh:
    """The first device, along the axis that divides state."""
    return jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
