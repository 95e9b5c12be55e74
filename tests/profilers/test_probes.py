"""Collective and copy probes on virtual devices: what they run, hold, leave behind, and say when they cannot."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.entries import CollectiveKind, Direction, Method
from jax_deepcompile.profilers import collective, copies
from jax_deepcompile.profilers.probes import ProbeLimits, fit_or_fall_back

LIMITS = ProbeLimits(limit_bytes=1 << 16, runs=1)


def make_mesh(*sizes: int) -> jax.sharding.Mesh:
    names = ("data", "fsdp")[-len(sizes) :]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.pure
def test_sizes_are_geometric_and_within_the_limit():
    assert list(ProbeLimits(1 << 20, growth=8).sizes_bytes(32)) == [1024, 8192, 65536, 524288]
    assert list(ProbeLimits(1 << 40, largest_bytes=8192).sizes_bytes(32)) == [1024, 8192]
    assert list(ProbeLimits(30_000).sizes_bytes(multiple_bytes=4 * 3)) == [1032, 8256]
    assert list(ProbeLimits(0).sizes_bytes(32)) == []


@pytest.mark.pure
def test_large_collectives_are_repeated_less():
    limits = ProbeLimits(1 << 30, traffic_bytes=1 << 20, most_repeats=16)
    assert [limits.repeats(size) for size in (1024, 1 << 18, 1 << 20, 1 << 24)] == [16, 4, 1, 1]


def failing(points: list[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    yield from points
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a long list of buffers")


@pytest.mark.pure
def test_a_failure_leaves_what_was_measured_before():
    fit, source = fit_or_fall_back(failing([(1024, 1e-5), (8192, 2e-5)]), LIMITS)
    assert fit is not None
    assert source.method is Method.MEASURED
    assert source.note == "larger sizes failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory"


@pytest.mark.pure
def test_a_failure_too_early_is_the_reason():
    fit, source = fit_or_fall_back(failing([(1024, 1e-5)]), LIMITS)
    assert fit is None
    assert str(source) == "analytical: RuntimeError: RESOURCE_EXHAUSTED: out of memory"


@pytest.mark.pure
def test_a_mistake_of_ours_is_not_a_fallback():
    def broken():
        yield 1 / 0

    with pytest.raises(ZeroDivisionError):
        fit_or_fall_back(broken(), LIMITS)


@pytest.mark.cpu_mesh
def test_every_kind_over_every_axis_and_over_all():
    before = len(jax.live_arrays())
    found = collective.measure_collectives(make_mesh(2, 4), ProbeLimits(limit_bytes=1 << 15, runs=1))
    axes = [("data",), ("fsdp",), ("data", "fsdp")]
    assert [entry.key for entry in found] == [(kind, names) for names in axes for kind in CollectiveKind]
    for entry in found:
        assert entry.fit is not None, entry.source
        assert [size for size, _ in entry.fit.points] == [1024, 8192], entry.key
        assert all(seconds > 0 for _, seconds in entry.fit.points)
        assert entry.source.method is Method.MEASURED
    assert len(jax.live_arrays()) == before


@pytest.mark.cpu_mesh
def test_an_axis_of_one_device_is_left_out():
    found = collective.measure_collectives(make_mesh(1, 2), ProbeLimits(limit_bytes=1 << 15, runs=1))
    assert {entry.axes for entry in found} == {("fsdp",)}


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("kind", CollectiveKind)
def test_no_probe_runs_that_takes_more_than_the_limit(kind: CollectiveKind, monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    run = collective._median_seconds

    def watched(probe, shape, runs):
        figures = probe.memory_analysis()
        taken.append(figures.argument_size_in_bytes + figures.temp_size_in_bytes)
        return run(probe, shape, runs)

    monkeypatch.setattr(collective, "_median_seconds", watched)
    entry = collective.measure_collective(make_mesh(8), kind, ("fsdp",), LIMITS)
    assert entry.fit is not None
    assert 0 < max(taken) <= LIMITS.limit_bytes


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("limit_bytes", [0, 1000, 8000])
def test_too_low_a_limit_is_said(limit_bytes: int):
    mesh = make_mesh(8)
    entry = collective.measure_collective(mesh, CollectiveKind.ALL_REDUCE, ("fsdp",), ProbeLimits(limit_bytes))
    copy = copies.measure_copy(mesh, Direction.TO_HOST, ProbeLimits(limit_bytes))
    for fallback in (entry, copy):
        assert fallback.fit is None
        expected = f"analytical: a limit of {limit_bytes} bytes a device leaves no two sizes to measure"
        assert str(fallback.source) == expected


@pytest.mark.cpu_mesh
def test_copies_both_ways():
    before = len(jax.live_arrays())
    found = copies.measure_copies(make_mesh(8), LIMITS)
    assert [entry.direction for entry in found] == ["to host", "from host"]
    for entry in found:
        assert entry.fit is not None, entry.source
        assert [size for size, _ in entry.fit.points] == [1024, 8192, 65536]
    assert found[0].both_ways == found[1].both_ways >= 1.0
    assert len(jax.live_arrays()) == before


@pytest.mark.pure
@pytest.mark.parametrize(
    ("alone_s", "together_s", "longer"),
    [
        ((2.0, 2.0), 2.0, 1.0),
        ((2.0, 2.0), 4.0, 2.0),
        ((1.0, 3.0), 3.0, 1.0),
        ((1.0, 3.0), 4.0, 2.0),
        ((2.0, 2.0), 1.9, 1.0),
    ],
    ids=["beside each other", "in turn", "the shorter within the longer", "one after the other", "noise"],
)
def test_copies_beside_each_other(monkeypatch, alone_s, together_s, longer):
    times = iter([*alone_s, together_s])
    monkeypatch.setattr(copies, "_seconds", lambda *_: next(times))
    monkeypatch.setattr(copies, "_original", lambda *_: contextlib.nullcontext())
    assert copies._beside_each_other(None, LIMITS) == longer


@pytest.mark.pure
def test_devices_that_are_not_here():
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    found = (*collective.measure_collectives(mesh, LIMITS), *copies.measure_copies(mesh, LIMITS))
    assert len(found) == 7
    for entry in found:
        assert entry.fit is None
        assert str(entry.source) == "analytical: the devices of this mesh are not attached to this process"


def compiled_chain(mesh: jax.sharding.Mesh, kind: CollectiveKind, platform: str) -> str:
    spec = jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names))
    shape = jax.ShapeDtypeStruct((mesh.size * HELD,), "float32", sharding=spec)
    chain = collective.chain(mesh, kind, mesh.axis_names, repeats=3)
    return jax.jit(chain, donate_argnums=0).trace(shape).lower(lowering_platforms=(platform,)).compile().as_text() or ""


HELD = 4096
"""Items that each device holds."""

RESULTS = {CollectiveKind.ALL_GATHER: HELD * 8, CollectiveKind.REDUCE_SCATTER: HELD // 8}
"""Items that come out of one collective, where that is another number."""


def assert_whole_collectives_in_a_loop(text: str, kind: CollectiveKind):
    """One collective of the kind, none of another, on all that the probe claims to move, run three times."""
    opcodes = {other: rf" {other}(?:-start)?\(" for other in CollectiveKind}
    assert re.search(r"known_trip_count\W+n\W+3\b", text), text
    assert {other for other in CollectiveKind if re.search(opcodes[other], text)} == {kind}
    line = next(line for line in text.splitlines() if re.search(opcodes[kind], line))
    result = re.split(opcodes[kind], line)[0]
    items = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", result)]
    assert RESULTS.get(kind, HELD) in (sum(items), items[-1]), line


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("kind", CollectiveKind)
def test_xla_keeps_the_probes_whole(kind: CollectiveKind):
    assert_whole_collectives_in_a_loop(compiled_chain(make_mesh(8), kind, "cpu"), kind)


@pytest.mark.h100_aot
@pytest.mark.parametrize("kind", CollectiveKind)
def test_xla_keeps_the_probes_whole_on_h100(kind: CollectiveKind):
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    assert_whole_collectives_in_a_loop(compiled_chain(mesh, kind, "cuda"), kind)
