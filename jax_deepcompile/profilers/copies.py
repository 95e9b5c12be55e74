"""Times copies between the devices' memory and pinned memory of their hosts, all devices at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_deepcompile.costs.devices import has_host_memory
from jax_deepcompile.costs.entries import CopyFit, Direction, analytical
from jax_deepcompile.ir.memory import HOST_KIND
from jax_deepcompile.ir.placement import AnyMesh, attached
from jax_deepcompile.profilers.probes import NOT_ATTACHED, ProbeLimits, fit_or_fall_back
from jax_deepcompile.profilers.timing import timed


def measure_copies(mesh: AnyMesh, limits: ProbeLimits) -> tuple[CopyFit, ...]:
    """Both directions; where one cannot be measured its entry has no fit and says why."""
    return tuple(measure_copy(mesh, direction, limits) for direction in Direction)


def measure_copy(mesh: AnyMesh, direction: Direction, limits: ProbeLimits) -> CopyFit:
    """Copies in one direction; sizes are those on each device, where a copy takes that many bytes and no more."""
    if not isinstance(mesh, Mesh) or not attached(mesh):
        return CopyFit(direction, None, analytical(NOT_ATTACHED))
    if not has_host_memory(mesh):
        return CopyFit(direction, None, analytical(f"the devices have no memory of kind {HOST_KIND}"))
    fit, source = fit_or_fall_back(_points(mesh, direction, limits), limits)
    return CopyFit(direction, fit, source)


def _points(mesh: Mesh, direction: Direction, limits: ProbeLimits) -> Iterator[tuple[int, float]]:
    """Pairs (bytes on each device, seconds of the copy)."""
    device = NamedSharding(mesh, PartitionSpec(mesh.axis_names), memory_kind="device")
    host = device.with_memory_kind(HOST_KIND)
    source, target = (host, device) if direction is Direction.FROM_HOST else (device, host)
    for size_bytes in limits.sizes_bytes(multiple_bytes=4):
        shape = (mesh.size * size_bytes // 4,)
        original = jax.block_until_ready(jax.jit(lambda shape=shape: jnp.zeros(shape), out_shardings=source)())
        try:
            seconds = [_copy_seconds(original, target) for _ in range(limits.runs + 1)]
        finally:
            original.delete()
        yield size_bytes, statistics.median(seconds[1:])


def _copy_seconds(original: jax.Array, target: NamedSharding) -> float:
    seconds, copy = timed(lambda: jax.device_put(original, target))
    copy.delete()
    return seconds
