"""Tables for the devices of a mesh, and what connects them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_deepcompile._jax_compat import described_gpu
from jax_deepcompile.costs.entries import Axis, Machine
from jax_deepcompile.costs.hardware import CPU_HOST, CPU_NETWORK, H100_SXM, H200_SXM, Hardware, Network
from jax_deepcompile.costs.tables import fitted_hardware, latest_table, stored_tables
from jax_deepcompile.ir.placement import AnyMesh

_NETWORK = re.compile(r" \((\d+) x ([\d.]+) Gbit/s a node\)$")
_GPU = ("gpu", "cuda")


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


def has_table(device_kind: str) -> bool:
    """Whether ``hardware_of`` knows the device, and does not take it for another one."""
    return any(name in device_kind.lower() for name in ("cpu", "h100", "h200"))


def network_of(devices: Iterable[Any]) -> Network:
    """The network between ``devices``: with the cards that their kind names, else one of 400 Gbit/s a GPU.

    Of CPU devices: the memory of their host.
    """
    devices = tuple(devices)
    gpus_per_node = max(Counter(_node(device) for device in devices).values())
    if "cpu" in devices[0].device_kind.lower():
        return replace(CPU_NETWORK, gpus_per_node=gpus_per_node)
    named = _NETWORK.search(devices[0].device_kind)
    if named is None:
        return Network(gpus_per_node, nics_per_node=gpus_per_node)
    return Network(gpus_per_node, nics_per_node=int(named[1]), nic_gbps=float(named[2]))


def allocator_bytes_of(mesh: Mesh) -> int | None:
    """What programs of this process may take of each GPU of ``mesh``: of three quarters of it, unless JAX is told
    otherwise; in multiples of 64 MiB, equal in all processes. None for devices that are not here, and for CPUs."""
    for device in mesh.devices.flat:
        if device.platform in _GPU and device.process_index == jax.process_index() and _is_here(device):
            found = (device.memory_stats() or {}).get("bytes_limit")
            return found and found >> 26 << 26
    return None


def is_described(mesh: AnyMesh | None) -> bool:
    """Whether the GPUs of ``mesh`` are not here: programs are compiled for what is known of them."""
    first = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    return first is not None and first.platform in _GPU and not _is_here(first)


def as_if_here(mesh: AnyMesh | None) -> AbstractContextManager[None]:
    """What the user's code is traced in: where the GPUs of ``mesh`` are described only, JAX finds their cuDNN."""
    if not isinstance(mesh, Mesh) or not is_described(mesh):
        return nullcontext()
    device = mesh.devices.flat[0]
    return described_gpu(hardware_of(device.device_kind).cudnn_version, device.compute_capability)


def _is_here(device: Any) -> bool:
    return getattr(device.client, "runtime_type", None) != "compile_only_runtime"


def kind_with_network(device_kind: str, network: Network) -> str:
    """``device_kind``, naming a node's network cards for ``network_of`` unless they are 400 Gbit/s, one a GPU."""
    if network == Network(network.gpus_per_node, nics_per_node=network.gpus_per_node):
        return device_kind
    return f"{device_kind} ({network.nics_per_node} x {network.nic_gbps:g} Gbit/s a node)"


def _node(device: Any) -> int:
    """GPUs that share a machine have one slice index, however many processes drive them."""
    slice_index = getattr(device, "slice_index", None) if _is_here(device) else None
    return device.process_index if slice_index is None else slice_index


def machine_of(mesh: AnyMesh) -> Machine:
    """What a profile's collectives and copies, and plans, belong to."""
    versions = tuple((package, version(package)) for package in ("jax", "jaxlib"))
    if not isinstance(mesh, Mesh):
        sizes = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
        return Machine("abstract", tuple(Axis(name, size) for name, size in sizes), versions)
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    axes = tuple(
        Axis(name, mesh.shape[name], _most_different(np.moveaxis(processes, position, -1)))
        for position, name in enumerate(mesh.axis_names)
    )
    return Machine(mesh.devices.flat[0].device_kind, axes, versions)


def _most_different(values: np.ndarray) -> int:
    """How many different values a row along the last dimension has at most."""
    return max(len(set(row)) for row in values.reshape(-1, values.shape[-1]).tolist())
