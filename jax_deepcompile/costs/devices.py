"""Tables for the devices of a mesh, and what connects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from jax_deepcompile.costs.hardware import CPU_HOST, H100_SXM, H200_SXM, Hardware, Network


def hardware_of(device_kind: str) -> Hardware:
    """The table for a device, by what JAX calls its kind; an unknown GPU is taken for an H100."""
    kind = device_kind.lower()
    if "cpu" in kind:
        return CPU_HOST
    return H200_SXM if "h200" in kind else H100_SXM


def network_of(devices: Iterable[Any]) -> Network:
    """The network between ``devices``: those of one process share a node."""
    per_node = Counter(device.process_index for device in devices)
    return Network(gpus_per_node=max(per_node.values()))
