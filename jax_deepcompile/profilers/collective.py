"""Times collectives over the axes of a mesh.

A probe is a program of a few collectives of one size in a row, each waiting for the one before, so that dispatching
from the host weighs little. It is compiled before anything is allocated, and only run if XLA's figure for its memory
is within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_deepcompile.costs.entries import CollectiveFit, CollectiveKind, analytical
from jax_deepcompile.ir.placement import AnyMesh, attached
from jax_deepcompile.lowering.compile import peak_bytes
from jax_deepcompile.profilers.probes import NOT_ATTACHED, ProbeLimits, fit_or_fall_back
from jax_deepcompile.profilers.timing import median_seconds

_ITEM_BYTES = 4
"""Of float32, which the probes hold."""


def measure_collectives(mesh: AnyMesh, limits: ProbeLimits) -> tuple[CollectiveFit, ...]:
    """Every kind of collective over every axis of ``mesh`` and over all of them together.

    Where one cannot be measured its entry has no fit and says why.
    """
    return tuple(measure_collective(mesh, kind, axes, limits) for axes in _axis_groups(mesh) for kind in CollectiveKind)


def measure_collective(mesh: AnyMesh, kind: CollectiveKind, axes: Sequence[str], limits: ProbeLimits) -> CollectiveFit:
    """One kind of collective over ``axes``, at once along every line of devices that they make."""
    if not isinstance(mesh, Mesh) or not attached(mesh):
        return CollectiveFit(kind, tuple(axes), None, analytical(NOT_ATTACHED))
    fit, source = fit_or_fall_back(_points(mesh, kind, tuple(axes), limits), limits)
    return CollectiveFit(kind, tuple(axes), fit, source)


def _axis_groups(mesh: AnyMesh) -> list[tuple[str, ...]]:
    axes = tuple(name for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if size > 1)
    return [(name,) for name in axes] + [axes] * (len(axes) > 1)


def _points(
    mesh: Mesh, kind: CollectiveKind, axes: tuple[str, ...], limits: ProbeLimits
) -> Iterator[tuple[int, float]]:
    """Pairs (bytes, seconds of one collective), up to the size at which the memory limit is reached."""
    parts = math.prod(mesh.shape[name] for name in axes)
    for size_bytes in limits.sizes_bytes(multiple_bytes=parts * _ITEM_BYTES):
        repeats = limits.repeats(size_bytes)
        held_bytes = size_bytes // parts if kind is CollectiveKind.ALL_GATHER else size_bytes
        shape = jax.ShapeDtypeStruct(
            (mesh.size * held_bytes // _ITEM_BYTES,),
            jnp.float32,
            sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        )
        probe = jax.jit(chain(mesh, kind, axes, repeats), donate_argnums=0).lower(shape).compile()
        if peak_bytes(probe.memory_analysis()) > limits.limit_bytes:
            return
        yield size_bytes, _median_seconds(probe, shape, limits.runs) / repeats


def _median_seconds(probe: Callable, shape: jax.ShapeDtypeStruct, runs: int) -> float:
    """Of ``probe``, called on its own result each time: it never holds more than one buffer, freed in the end."""
    buffer = jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)()

    def run() -> jax.Array:
        nonlocal buffer
        buffer = probe(buffer)
        return buffer

    try:
        return median_seconds(run, runs)
    finally:
        buffer.delete()


def chain(mesh: AnyMesh, kind: CollectiveKind, axes: Sequence[str], repeats: int) -> Callable[[jax.Array], jax.Array]:
    """``repeats`` collectives in a row, on a flat array divided among all devices."""
    link = _LINKS[kind]
    spec = PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        lambda block: lax.fori_loop(0, repeats, lambda _, held: link(held, tuple(axes)), block),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )


def _all_gather(block, axes: tuple[str, ...]):
    """The barrier keeps XLA from gathering only what the slice leaves."""
    return lax.optimization_barrier(lax.all_gather(block, axes, tiled=True))[: block.size]


def _reduce_scatter(block, axes: tuple[str, ...]):
    return lax.dynamic_update_slice(block, lax.psum_scatter(block, axes, tiled=True), (0,))


def _all_to_all(block, axes: tuple[str, ...]):
    return lax.all_to_all(block, axes, 0, 0, tiled=True)


def _permute(block, axes: tuple[str, ...]):
    count = lax.axis_size(axes)
    return lax.ppermute(block, axes, [(index, (index + 1) % count) for index in range(count)])


_LINKS = {
    CollectiveKind.ALL_GATHER: _all_gather,
    CollectiveKind.REDUCE_SCATTER: _reduce_scatter,
    CollectiveKind.ALL_REDUCE: lax.psum,
    CollectiveKind.ALL_TO_ALL: _all_to_all,
    CollectiveKind.PERMUTE: _permute,
}
"""One collective, from what a device holds to what it holds next."""
