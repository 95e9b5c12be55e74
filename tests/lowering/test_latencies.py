"""Latencies reach XLA with the other options, and not as a file."""

from __future__ import annotations

import math
import re

import pytest

from jax_deepcompile.lowering.latencies import Latency, latency_options

pytestmark = pytest.mark.pure


def told(*latencies: Latency) -> str:
    options = latency_options(latencies)
    assert set(options) == {"fdo_profile"}
    value = options["fdo_profile"]
    assert isinstance(value, bytes)
    return value.decode()


def test_one_line_an_instruction():
    assert told(Latency("all-gather-start.1", 12.5), Latency("fusion", 0.0004)) == (
        "costs { name: 'all-gather-start.1' cost_us: 12.500 }\ncosts { name: 'fusion' cost_us: 0.000 }\n"
    )


def test_none_is_no_option():
    assert latency_options(()) == {}


def test_no_file_is_written(tmp_path, monkeypatch):
    """Not even where files go that are written anywhere: another user may have put a link there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told(Latency("fusion", 1.0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ['a" cost_us: 0 } costs { name: "b', "a' }", "a\"'", "a\\", "a\nb", "\x00", "é"])
def test_a_name_is_one_name(name: str):
    """A string of text protos ends at the first quote like its own that no backslash is before."""
    (line,) = told(Latency(name, 1.0)).splitlines()
    found = re.fullmatch(r"costs \{ name: (['\"])((?:\\.|(?!\1)[^\\])*)\1 cost_us: 1\.000 \}", line)
    assert found is not None
    assert found[2].isascii()
    assert found[2].encode().decode("unicode_escape").encode("latin1").decode() == name


@pytest.mark.parametrize("microseconds", [-1.0, math.nan, math.inf])
def test_a_latency_is_a_time(microseconds: float):
    with pytest.raises(ValueError, match=r"'fusion' is said to take (-1.0|nan|inf) microseconds"):
        Latency("fusion", microseconds)
