"""What collectives and copies take between devices that share this host: measured once, and kept."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_deepcompile import errors
from jax_deepcompile.costs.devices import machine_of
from jax_deepcompile.costs.entries import CollectiveKind, CopyFit, Direction, Machine
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.profilers.collective import measure_collective
from jax_deepcompile.profilers.probes import ProbeLimits, fit_or_fall_back
from jax_deepcompile.profilers.timing import median_seconds
from jax_deepcompile.runtime.files import write_whole

_COLLECTIVES = ProbeLimits(limit_bytes=1 << 20, largest_bytes=1 << 18, growth=16, most_repeats=8)
"""Of sizes where it matters how long devices wait for each other: 1, 16 and 256 KiB."""

_COPIES = ProbeLimits(limit_bytes=1 << 23, smallest_bytes=1 << 17, largest_bytes=1 << 23)
"""Up to sizes that no cache holds for all devices: what a step joins and cuts was made long before."""

_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)

_PIECES = 8
"""That are joined and cut again."""


class HostProfileWarning(UserWarning):
    """What was measured of this host could not be read or kept; it is measured anew, and nothing else changes."""


def host_profile(mesh: Mesh, folder: Path | None) -> Profile | None:
    """Collectives over the axes of ``mesh``, and copies of all its devices at once, as this host does them.

    Args:
      mesh: of attached devices that share their host.
      folder: where it is kept between runs; None for this process alone.

    Returns:
      The profile; None in a run of several processes, in which files of one may not be those of another.
    """
    if jax.process_count() > 1:
        return None
    machine = machine_of(mesh)
    path = None if folder is None else folder / f"{hashlib.sha256(repr(machine).encode()).hexdigest()[:32]}.json"
    found = _kept(path, machine)
    if found is None:
        found = _measured(mesh)
        _keep(path, found)
    return found


@functools.lru_cache(maxsize=8)
def _measured(mesh: Mesh) -> Profile:
    fit, source = fit_or_fall_back(_copies(mesh), _COPIES)
    copies = tuple(CopyFit(direction, fit, source) for direction in Direction)
    axes = tuple(name for name, size in mesh.shape.items() if size > 1)
    collectives = tuple(measure_collective(mesh, kind, axes, _COLLECTIVES) for kind in _KINDS)
    return Profile("", machine_of(mesh), collectives=collectives, copies=copies)


def _copies(mesh: Mesh) -> Iterator[tuple[int, float]]:
    """Pairs (bytes copied by each device, seconds): the host's memory is the devices', so pieces are joined and cut."""
    rows = PartitionSpec(mesh.axis_names)

    def again(_: int, pieces: list[jax.Array]) -> list[jax.Array]:
        joined = lax.optimization_barrier(jnp.concatenate(pieces))
        return lax.optimization_barrier(jnp.split(joined, _PIECES))

    for size_bytes in _COPIES.sizes_bytes(multiple_bytes=2 * _PIECES * 4):
        repeats = _COPIES.repeats(size_bytes)
        probe = jax.jit(
            jax.shard_map(
                lambda *pieces, repeats=repeats: lax.fori_loop(0, repeats, again, list(pieces)),
                mesh=mesh,
                in_specs=rows,
                out_specs=rows,
                check_vma=False,
            )
        )
        shape = (mesh.size * size_bytes // (2 * _PIECES * 4),)
        pieces = [jnp.zeros(shape, device=NamedSharding(mesh, rows)) for _ in range(_PIECES)]
        yield size_bytes, median_seconds(lambda probe=probe, pieces=pieces: probe(*pieces), _COPIES.runs) / repeats


def _kept(path: Path | None, machine: Machine) -> Profile | None:
    """What an earlier run wrote of this very machine."""
    try:
        if path is None or not path.is_file():
            return None
        found = Profile.read(path)
    except (OSError, errors.ProfileFormatError) as error:
        warnings.warn(f"{path} is measured anew: {error}", HostProfileWarning, stacklevel=2)
        return None
    if found.machine != machine:
        why = f"it is of {found.machine}, and this is {machine}"
        warnings.warn(f"{path} is measured anew: {why}", HostProfileWarning, stacklevel=2)
        return None
    return found


def _keep(path: Path | None, profile: Profile) -> None:
    if path is None:
        return
    try:
        write_whole(path, profile.to_json())
    except OSError as error:
        warnings.warn(f"what was measured of this host was not kept: {error}", HostProfileWarning, stacklevel=2)
