"""Tables for the devices of a mesh, and what connects them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jax_deepcompile.costs.hardware import CPU_HOST, H100_SXM, H200_SXM, Hardware, Network
from jax_deepcompile.costs.tables import fitted_hardware, latest_table, stored_tables

_NETWORK = re.compile(r" \((\d+) x ([\d.]+) Gbit/s a node\)$")


def hardware_of(device_kind: str) -> Hardware:
    """The table for a device, by what JAX calls its kind; an unknown GPU is taken for an H100.

    Fitted to what was measured on such a device, where the package has that.
    """
    kind = device_kind.lower()
    if "cpu" in kind:
        return CPU_HOST
    published = H200_SXM if "h200" in kind else H100_SXM
    measured = latest_table(_NETWORK.sub("", device_kind), stored_tables())
    return published if measured is None else fitted_hardware(published, measured)


def network_of(devices: Iterable[Any]) -> Network:
    """The network between ``devices``: with the cards that their kind names, else one of 400 Gbit/s a GPU."""
    devices = tuple(devices)
    gpus_per_node = max(Counter(_node(device) for device in devices).values())
    named = _NETWORK.search(devices[0].device_kind)
    if named is None:
        return Network(gpus_per_node, nics_per_node=gpus_per_node)
    return Network(gpus_per_node, nics_per_node=int(named[1]), nic_gbps=float(named[2]))


def kind_with_network(device_kind: str, network: Network) -> str:
    """``device_kind``, naming a node's network cards for ``network_of`` unless they are 400 Gbit/s, one a GPU."""
    if network == Network(network.gpus_per_node, nics_per_node=network.gpus_per_node):
        return device_kind
    return f"{device_kind} ({network.nics_per_node} x {network.nic_gbps:g} Gbit/s a node)"


def _node(device: Any) -> int:
    """GPUs that share a machine have one slice index, however many processes drive them."""
    is_here = getattr(device.client, "runtime_type", None) != "compile_only_runtime"
    slice_index = getattr(device, "slice_index", None) if is_here else None
    return device.process_index if slice_index is None else slice_index
