"""Latency and bandwidth recovered from times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile.profilers.fit import fit_line

pytestmark = pytest.mark.pure

SIZES_BYTES = tuple(1024 * 8**power for power in range(7))
latencies_s = st.floats(1e-6, 1e-3)
bandwidths_bytes_per_s = st.floats(1e8, 1e12)


def line(latency_s: float, bandwidth_bytes_per_s: float) -> list[tuple[int, float]]:
    return [(size, latency_s + size / bandwidth_bytes_per_s) for size in SIZES_BYTES]


@given(latencies_s, bandwidths_bytes_per_s)
def test_a_line_is_found_exactly(latency_s: float, bandwidth_bytes_per_s: float):
    fit = fit_line(line(latency_s, bandwidth_bytes_per_s))
    for size, seconds in fit.points:
        assert fit.seconds(size) == pytest.approx(seconds, rel=1e-6)
    assert fit.relative_residual < 1e-6


def test_disturbed_measurements_do_not_move_it():
    points = line(5e-5, 3e9)
    points[1] = (points[1][0], points[1][1] * 10)
    points[5] = (points[5][0], points[5][1] * 4)
    fit = fit_line(points)
    assert fit.latency_s == pytest.approx(5e-5, rel=1e-6)
    assert 1 / fit.inverse_bandwidth_s_per_byte == pytest.approx(3e9, rel=1e-6)
    assert fit.relative_residual > 0.1, "the disturbance is reported"


@pytest.mark.parametrize("seed", range(5))
def test_noise(seed: int):
    noise = np.random.default_rng(seed).normal(1.0, 0.03, len(SIZES_BYTES))
    fit = fit_line([(size, seconds * factor) for (size, seconds), factor in zip(line(2e-5, 1e10), noise, strict=True)])
    assert fit.latency_s == pytest.approx(2e-5, rel=0.1)
    assert 1 / fit.inverse_bandwidth_s_per_byte == pytest.approx(1e10, rel=0.15)
    assert fit.relative_residual < 0.1


def test_times_that_fall_have_latency_only():
    fit = fit_line([(1024, 3e-5), (8192, 2e-5), (65536, 1e-5)])
    assert fit.inverse_bandwidth_s_per_byte == 0
    assert 1e-5 <= fit.latency_s <= 3e-5


def test_times_in_proportion_to_bytes_have_no_latency():
    fit = fit_line([(size, size / 1e9) for size in SIZES_BYTES])
    assert fit.latency_s == pytest.approx(0, abs=1e-12)
    assert 1 / fit.inverse_bandwidth_s_per_byte == pytest.approx(1e9)
