"""Where a value of a local program is: in the memory of its device, or pinned in that of the host."""

from __future__ import annotations

from typing import Any

import jax

HOST_KIND = "pinned_host"
"""What JAX calls the host's memory in shardings."""

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


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
