"""Times copies between the devices' memory and pinned memory of their hosts, all devices at once, one way and both."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

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
    """Both directions, alone and beside each other; where one cannot be measured its entry has no fit and says why."""
    found = tuple(measure_copy(mesh, direction, limits) for direction in Direction)
    if not isinstance(mesh, Mesh) or any(each.fit is None for each in found):
        return found
    longer = _beside_each_other(mesh, limits)
    return tuple(replace(each, both_ways=longer) for each in found)


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
    for size_bytes in limits.sizes_bytes(multiple_bytes=4):
        with _original(mesh, direction, size_bytes) as (original, target):
            yield size_bytes, _seconds([(original, target)], limits.runs)


def _beside_each_other(mesh: Mesh, limits: ProbeLimits) -> float | None:
    """How many times longer copies take that begin together, one each way; None where two do not fit.

    Both are as large, and slower as long as both run: then the longer one goes on as if alone.
    """
    *_, largest = limits.sizes_bytes(multiple_bytes=4)
    size_bytes = largest // 8 * 4
    there, here = (_original(mesh, direction, size_bytes) for direction in Direction)
    try:
        with there as out, here as back:
            shorter_s, longer_s = sorted(_seconds([each], limits.runs) for each in (out, back))
            together_s = _seconds([out, back], limits.runs)
    except RuntimeError:
        return None
    return max(1.0, 1 + (together_s - longer_s) / shorter_s)


@contextlib.contextmanager
def _original(mesh: Mesh, direction: Direction, size_bytes: int) -> Iterator[tuple[jax.Array, NamedSharding]]:
    """What is copied, of that many bytes on each device, and where to."""
    device = NamedSharding(mesh, PartitionSpec(mesh.axis_names), memory_kind="device")
    host = device.with_memory_kind(HOST_KIND)
    source, target = (host, device) if direction is Direction.FROM_HOST else (device, host)
    make = jax.jit(lambda: jnp.zeros((mesh.size * size_bytes // 4,)), out_shardings=source)
    original = jax.block_until_ready(make())
    try:
        yield original, target
    finally:
        original.delete()


def _seconds(copies: Sequence[tuple[jax.Array, NamedSharding]], runs: int) -> float:
    """The median of all ``copies`` at a time."""

    def once() -> float:
        seconds, made = timed(lambda: [jax.device_put(original, target) for original, target in copies])
        for copy in made:
            copy.delete()
        return seconds

    return statistics.median([once() for _ in range(runs + 1)][1:])
