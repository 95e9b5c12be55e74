"""The hardware and the network of a mesh's devices."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import described_gpu
from jax_deepcompile.costs.entries import Axis, Machine
from jax_deepcompile.costs.hardware import CPU_HOST, H100_SXM, HARDWARE, Hardware, known_hardware
from jax_deepcompile.costs.network import CPU_NETWORK, Network, described_network
from jax_deepcompile.ir.memory import HOST_KIND
from jax_deepcompile.ir.placement import AnyMesh, attached

_GPU = ("gpu", "cuda")


def hardware_of(device_kind: str) -> Hardware:
    """The hardware of a device, by what JAX calls its kind; an unknown GPU is taken for an H100, with a warning."""
    return known_hardware(device_kind) or _taken_for_an_h100(device_kind)


@functools.cache
def _taken_for_an_h100(device_kind: str) -> Hardware:
    known = [hardware.name for hardware in HARDWARE.values() if hardware is not CPU_HOST]
    warnings.warn(errors.UnknownHardwareWarning(device_kind, H100_SXM.name, known), stacklevel=3)
    return H100_SXM


def network_of(devices: Iterable[Any]) -> Network:
    """The network between ``devices``: as their target describes it, else with one card of 400 Gbit/s a GPU.

    Devices that are a part of each node have their share of its cards. Those of CPUs: the memory of their host.
    """
    devices = tuple(devices)
    gpus_per_node = max(Counter(map(_node, devices)).values())
    described = None if _is_here(devices[0]) else described_network(devices[0].client)
    if described is None:
        return _assumed_network(devices[0].device_kind, gpus_per_node)
    cards = max(1, described.nics_per_node * gpus_per_node // described.gpus_per_node)
    return replace(described, gpus_per_node=gpus_per_node, nics_per_node=cards)


def _assumed_network(device_kind: str, gpus_per_node: int) -> Network:
    hardware = known_hardware(device_kind) or H100_SXM
    if hardware is CPU_HOST:
        return replace(CPU_NETWORK, gpus_per_node=gpus_per_node)
    return Network(gpus_per_node, nics_per_node=gpus_per_node, nvlink_bytes_per_s=hardware.nvlink_bytes_per_s)


def latency_bytes_of(mesh: AnyMesh) -> float:
    """What a device could send while a collective over all of ``mesh`` begins; 0 without a network."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform not in _GPU:
        return 0.0
    network = network_of(mesh.devices.flat)
    group = (mesh.size, min(mesh.size, network.gpus_per_node))
    return network.ring_s(*group) * network.bus_bytes_per_s(*group)


def allocator_bytes_of(mesh: Mesh) -> int | None:
    """What programs of this process may take of each GPU of ``mesh``: of three quarters of it, unless JAX is told
    otherwise; in multiples of 64 MiB, equal in all processes. None for devices that are not here, and for CPUs."""
    for device in mesh.devices.flat:
        if device.platform in _GPU and device.process_index == jax.process_index() and _is_here(device):
            found = (device.memory_stats() or {}).get("bytes_limit")
            return found and found >> 26 << 26
    return None


def host_bytes_of(mesh: Mesh) -> int:
    """What programs may take of the host's memory for each device of ``mesh``: where it is here its own, as far as XLA
    pins it, in whole GiB, equal in all processes; else as its target is sold; 0 for CPUs, whose memory it is."""
    devices = list(mesh.devices.flat)
    if devices[0].platform not in _GPU:
        return 0
    if not _is_here(devices[0]):
        return hardware_of(devices[0].device_kind).host_bytes
    if not has_host_memory(mesh):
        return 0
    of_node = max(Counter(map(_node, devices)).values())
    own_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // of_node
    pinned_bytes = _pinned_gb() * 10**9 // _most_of_a_process(mesh)
    return min(own_bytes, pinned_bytes) >> 30 << 30


def to_pin(mesh: AnyMesh, size_bytes: int) -> str:
    """What the environment has to say for XLA to pin that much of the host's memory for each device of ``mesh``."""
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform not in _GPU:
        return ""
    needed_gb = math.ceil(size_bytes * _most_of_a_process(mesh) / 10**9)
    return f"{PINNED_GB}={needed_gb}" if needed_gb > _pinned_gb() else ""


def _most_of_a_process(mesh: Mesh) -> int:
    """Devices of the process that has most of them."""
    return max(Counter(device.process_index for device in mesh.devices.flat).values())


def _pinned_gb() -> int:
    given = os.environ.get(PINNED_GB, "")
    return int(given) if given.isdecimal() else _PINNED_GB


def has_host_memory(mesh: Mesh) -> bool:
    """Whether programs can have values in the memory of the host; of devices that are not here they can."""
    kinds = {memory.kind for device in mesh.local_devices[:1] for memory in device.addressable_memories()}
    return HOST_KIND in kinds or not attached(mesh)


PINNED_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable by which XLA takes more of the host's memory for all GPUs of a process than this."""

_PINNED_GB = 64


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
    kind, network = mesh.devices.flat[0].device_kind, network_of(mesh.devices.flat)
    is_assumed = network == _assumed_network(kind, network.gpus_per_node)
    return Machine(kind, axes, versions, "" if is_assumed else network.cards)


def _most_different(values: np.ndarray) -> int:
    """How many different values a row along the last dimension has at most."""
    return max(len(set(row)) for row in values.reshape(-1, values.shape[-1]).tolist())
