"""Latencies reach XLA as a file named by its content."""

from __future__ import annotations

from pathlib import Path

import pytest

from jax_deepcompile.lowering.latencies import Latency, latency_options

pytestmark = pytest.mark.pure

OPTION = "xla_gpu_pgle_profile_file_or_directory_path"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def path_of(*latencies: Latency) -> Path:
    options = latency_options(latencies)
    assert set(options) == {OPTION}
    return Path(str(options[OPTION]))


def test_one_line_an_instruction():
    path = path_of(Latency("all-gather-start.1", 12.5), Latency("fusion", 0.0004))
    assert path.read_text() == (
        'costs { name: "all-gather-start.1" cost_us: 12.500 }\ncosts { name: "fusion" cost_us: 0.000 }\n'
    )


def test_none_is_no_option():
    assert latency_options(()) == {}


def test_the_same_latencies_are_the_same_file_and_others_are_not():
    one = path_of(Latency("fusion", 1.0))
    assert path_of(Latency("fusion", 1.0)) == one
    assert path_of(Latency("fusion", 2.0)) != one


def test_a_file_is_left_as_it_is():
    path = path_of(Latency("fusion", 1.0))
    before = path.stat().st_mtime_ns
    assert path_of(Latency("fusion", 1.0)).stat().st_mtime_ns == before
