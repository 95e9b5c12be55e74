"""What a value takes, and where it is in a local program: in its device's memory, or pinned in the host's."""

from __future__ import annotations

import math
from typing import Any

import jax

HOST_KIND = "pinned_host"
"""What JAX calls the host's memory in shardings."""

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


def size_bytes(atom: Any) -> int:
    """Of a variable or a literal."""
    return math.prod(atom.aval.shape) * atom.aval.dtype.itemsize


def is_on_host(atom: Any) -> bool:
    """Whether a value is in the host's memory."""
    return getattr(jax.typeof(atom) if isinstance(atom, jax.Array) else atom.aval, "memory_space", None) == HOST


def is_fetch(eqn: Any) -> bool:
    """Whether ``eqn`` copies one value from the host to the device."""
    return eqn.primitive.name == "device_put" and len(eqn.outvars) == 1 and _crosses(eqn.invars[0], eqn.outvars[0])


def is_offload(eqn: Any) -> bool:
    """Whether ``eqn`` copies one value from the device to the host."""
    return eqn.primitive.name == "device_put" and len(eqn.outvars) == 1 and _crosses(eqn.outvars[0], eqn.invars[0])


def _crosses(host: Any, device: Any) -> bool:
    return is_on_host(host) and not is_on_host(device)
