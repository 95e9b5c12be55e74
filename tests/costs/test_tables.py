"""Tables of measured kernels: between their entries, into ``Hardware``, and to JSON and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.entries import Direction
from jax_deepcompile.costs.hardware import H100_SXM
from jax_deepcompile.costs.tables import (
    CopyTime,
    KernelTable,
    KernelTime,
    MatmulTime,
    fitted_hardware,
    latest_table,
    rising_points,
    seconds_at,
    stored_tables,
)

pytestmark = pytest.mark.pure

EMPTY = KernelTable("NVIDIA H100 80GB HBM3", "2026-11-21", ())

KNOTS = st.dictionaries(st.floats(1, 1e15), st.floats(1e-6, 10.0), min_size=1, max_size=8).map(
    lambda found: list(zip(sorted(found), sorted(found.values()), strict=True))
)
"""Points whose sizes increase and whose seconds do not decrease."""


def product(size: int, seconds: float, dtype: str = "bf16", form: str = "nn") -> MatmulTime:
    return MatmulTime(size, size, size, dtype, form, seconds)


def table(**entries) -> KernelTable:
    return dataclasses.replace(EMPTY, **entries)


@given(KNOTS)
def test_interpolation_is_exact_at_its_points(knots):
    points = rising_points(knots)
    assert [seconds_at(points, size) for size, _ in knots] == [seconds for _, seconds in knots]


@given(KNOTS, st.floats(0.1, 1e16), st.floats(0.1, 1e16))
def test_more_work_never_takes_less_time(knots, one, other):
    points = rising_points(knots)
    less, more = sorted((one, other))
    assert seconds_at(points, less) <= seconds_at(points, more) * (1 + 1e-9)


@given(KNOTS, st.floats(0.1, 1e16))
def test_between_two_points_lie_their_seconds(knots, size):
    points = rising_points(knots)
    below = max((seconds for known, seconds in points if known <= size), default=points[0][1])
    above = min((seconds for known, seconds in points if known >= size), default=float("inf"))
    assert below * (1 - 1e-9) <= seconds_at(points, size) <= above * (1 + 1e-9)


def test_in_the_middle_in_logarithms():
    assert seconds_at([(1e9, 1e-6), (1e11, 1e-4)], 1e10) == pytest.approx(1e-5)


def test_beyond_the_largest_the_rate_stays_and_below_the_smallest_the_seconds():
    points = [(1e9, 1e-5), (1e12, 2e-3)]
    assert seconds_at(points, 3e12) == pytest.approx(6e-3)
    assert seconds_at(points, 1.0) == 1e-5


def test_disturbed_measurements_do_not_make_seconds_fall():
    assert rising_points([(3, 1.0), (1, 2.0), (2, 5.0), (2, 3.0), (2, 4.0)]) == [(1, 2.0), (2, 4.0), (3, 4.0)]


def test_hardware_takes_over_medians_of_large_operations():
    flops = 2 * 8192**3
    known = table(
        matmuls=(
            *(product(8192, flops / rate, form=form) for form, rate in (("nn", 6e14), ("nt", 7e14), ("tn", 1e12))),
            product(8192, 1.0, dtype="f32"),
            product(256, 1.0),
        ),
        kernels=(
            KernelTime("copy", 1 << 30, (1 << 30) / 3.0e12),
            KernelTime("add", 3 << 29, (3 << 29) / 2.8e12),
            KernelTime("cast", 3 << 29, (3 << 29) / 2.9e12),
            KernelTime("transpose", 1 << 30, 1.0),
            KernelTime("copy", 1 << 20, 1.0),
        ),
        copies=(
            CopyTime(Direction.TO_HOST, 1 << 28, (1 << 28) / 5e10),
            CopyTime(Direction.FROM_HOST, 1 << 28, (1 << 28) / 5.5e10),
            CopyTime(Direction.FROM_HOST, 1 << 10, 1.0),
        ),
        shortest_kernel_s=1.5e-6,
        kernel_launch_s=1e-6,
    )
    fitted = fitted_hardware(H100_SXM, known)
    assert fitted.matmul_rate("bf16") == pytest.approx(6e14)
    assert fitted.memory_rate == pytest.approx(2.9e12)
    assert fitted.to_host_bytes_per_s == pytest.approx(5e10)
    assert fitted.from_host_bytes_per_s == pytest.approx(5.5e10)
    assert CostModel(fitted).memory_s(4) == pytest.approx(2.5e-6)
    assert (fitted.name, fitted.memory_bytes) == (H100_SXM.name, H100_SXM.memory_bytes)


def test_an_empty_table_leaves_the_hardware_as_it_is():
    small = table(matmuls=(product(64, 1e-5),), kernels=(KernelTime("copy", 1 << 10, 1e-6),))
    assert fitted_hardware(H100_SXM, EMPTY) == fitted_hardware(H100_SXM, small) == H100_SXM


def test_json_and_back():
    known = table(
        versions=(("jax", "0.11.2"),),
        matmuls=(product(64, 1e-5),),
        kernels=(KernelTime("copy", 1 << 10, 1e-6),),
        copies=(CopyTime(Direction.TO_HOST, 1 << 10, 1e-5),),
        shortest_kernel_s=1e-6,
    )
    assert KernelTable.from_json(known.to_json()) == known


@pytest.mark.parametrize("text", ["", "[]", '{"device_kind": "H100"}', EMPTY.to_json().replace("[]", "[3]")])
def test_what_is_no_table_is_refused(text: str):
    with pytest.raises(ValueError, match=r"it\.json is not a table of measured kernels: .*bench --suite gpu"):
        KernelTable.from_json(text, "it.json")


def test_an_entry_that_takes_no_time_is_refused():
    with pytest.raises(ValueError, match="takes no time"):
        table(matmuls=(product(64, 0.0),))


def test_stored_tables(tmp_path: Path):
    older, newer = EMPTY, dataclasses.replace(EMPTY, date="2027-01-02")
    other = dataclasses.replace(EMPTY, device_kind="another")
    for name, stored in (("b", older), ("a", newer), ("c", other)):
        (tmp_path / f"{name}.json").write_text(stored.to_json())
    (tmp_path / "README.md").write_text("no table")
    found = stored_tables(tmp_path)
    assert found == (newer, older, other)
    assert latest_table(EMPTY.device_kind, found) == newer
    assert latest_table("unknown", found) is None


def test_without_a_folder_there_are_no_tables(tmp_path: Path):
    assert stored_tables(tmp_path / "measured") == ()


def test_the_tables_of_the_package_can_be_read():
    assert all(isinstance(stored, KernelTable) for stored in stored_tables())


def test_a_broken_file_is_named(tmp_path: Path):
    (tmp_path / "h100.json").write_text("{")
    with pytest.raises(ValueError, match=r"h100\.json is not a table"):
        stored_tables(tmp_path)
