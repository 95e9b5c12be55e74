"""The memory of a compiled step: XLA's buffer assignment, and the allocator's high-water mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax.sharding import Mesh

from jax_deepcompile.costs.entries import MemoryFigures, Method, Source, analytical
from jax_deepcompile.costs.memory import memory_of
from jax_deepcompile.costs.simulate import HasText
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.ir.placement import AnyMesh, attached
from jax_deepcompile.profilers.probes import NOT_ATTACHED
from jax_deepcompile.profilers.timing import measured


class Executable(HasText, Protocol):
    """A compiled program, ``jax.stages.Compiled`` or ``jax_deepcompile.stages.CompiledStep``."""

    def memory_analysis(self) -> Any: ...


def measure_memory(compiled: Executable, mesh: AnyMesh) -> MemoryFigures | None:
    """What ``compiled`` takes of each device; None if the backend does not say.

    Call it after the step has run, and before anything larger does: the allocator keeps one high-water mark, of all
    that this process ever held at once.
    """
    figures = compiled.memory_analysis()
    if figures is None:
        return None
    peak_bytes, peak_source = allocator_peak(mesh)
    return MemoryFigures(
        argument_bytes=figures.argument_size_in_bytes,
        output_bytes=figures.output_size_in_bytes,
        alias_bytes=figures.alias_size_in_bytes,
        temp_bytes=figures.temp_size_in_bytes,
        host_argument_bytes=figures.host_argument_size_in_bytes,
        host_output_bytes=figures.host_output_size_in_bytes,
        host_temp_bytes=figures.host_temp_size_in_bytes,
        live_bytes=memory_of(read(compiled.as_text() or "")).live_bytes,
        source=Source(Method.COMPILED, note="XLA's buffer assignment"),
        allocator_peak_bytes=peak_bytes,
        allocator_source=peak_source,
    )


def allocator_peak(mesh: AnyMesh) -> tuple[int | None, Source]:
    """The most bytes ever held at once on the fullest device of this process, and how that is known."""
    if not isinstance(mesh, Mesh) or not attached(mesh):
        return None, analytical(NOT_ATTACHED)
    devices = mesh.local_devices
    return fullest_peak([device.memory_stats() or {} for device in devices], devices[0].platform)


def fullest_peak(stats: Sequence[Mapping[str, int]], platform: str) -> tuple[int | None, Source]:
    """The peak of the fullest device, from ``device.memory_stats()`` of each."""
    peaks_bytes = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    if not peaks_bytes:
        return None, analytical(f"the {platform} backend keeps no allocator statistics")
    return max(peaks_bytes), measured(1, "the allocator's high-water mark since the process started")
