"""Memory figures: XLA's own, and the allocator's where the backend has one."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from jax_deepcompile.costs.entries import Method
from jax_deepcompile.lowering.compile import peak_bytes
from jax_deepcompile.profilers import memory


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


def compiled_on(mesh: jax.sharding.Mesh) -> jax.stages.Compiled:
    rows = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))
    return jax.jit(lambda x: x + 1, donate_argnums=0).lower(rows).compile()


@pytest.mark.cpu_mesh
def test_buffer_assignment_of_one_device():
    mesh = make_mesh()
    figures = memory.measure_memory(compiled_on(mesh), mesh)
    assert figures is not None
    block_bytes = 64 * 256 * 4 // 8
    assert (figures.argument_bytes, figures.output_bytes, figures.alias_bytes) == (block_bytes,) * 3
    assert figures.device_bytes == block_bytes + figures.temp_bytes == peak_bytes(compiled_on(mesh).memory_analysis())
    assert str(figures.source) == "compiled: XLA's buffer assignment"
    assert block_bytes <= max(figures.live_bytes) <= figures.device_bytes + 8


@pytest.mark.cpu_mesh
def test_a_backend_without_allocator_statistics_says_so():
    peak_bytes, source = memory.allocator_peak(make_mesh())
    assert peak_bytes is None
    assert str(source) == "analytical: the cpu backend keeps no allocator statistics"


@pytest.mark.pure
def test_the_fullest_device_counts():
    stats = [{"peak_bytes_in_use": 10}, {"peak_bytes_in_use": 30}, {}, {"bytes_in_use": 40}]
    peak_bytes, source = memory.fullest_peak(stats, "gpu")
    assert peak_bytes == 30
    assert source.method is Method.MEASURED
    assert source.note == "the allocator's high-water mark since the process started"


@pytest.mark.pure
def test_devices_that_are_not_here_have_no_peak():
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    assert memory.allocator_peak(mesh)[0] is None
    assert "not attached" in str(memory.allocator_peak(mesh)[1])


@pytest.mark.pure
def test_a_backend_that_does_not_say():
    silent = SimpleNamespace(as_text=lambda: "", memory_analysis=lambda: None)
    assert memory.measure_memory(silent, AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))) is None
