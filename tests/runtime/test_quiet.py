"""What native libraries write to the standard error while they are loaded."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from jax_deepcompile.runtime import quiet
from jax_deepcompile.runtime.quiet import STDOUT, silenced, start_backends

pytestmark = pytest.mark.pure


def test_what_is_written_meanwhile_is_lost_and_nothing_else(capfd):
    with silenced():
        os.write(2, b"W0000 native")
    print("python", file=sys.stderr)
    assert capfd.readouterr().err == "python\n"


def test_what_c_prints_meanwhile_is_lost_though_it_is_buffered(capfd):
    print("before", end=" ")
    with silenced(STDOUT):
        ctypes.CDLL(None).printf(b"native")
    print("after", flush=True)
    assert capfd.readouterr().out == "before after\n"


def test_errors_are_not_lost(capfd):
    with pytest.raises(ValueError, match="why"), silenced():
        raise ValueError("why")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


@pytest.mark.parametrize(("there", "expected"), [("nowhere*", ""), ("quiet.py", "no driver\n")])
def test_what_jax_says_as_it_starts_is_lost_where_there_is_no_gpu(monkeypatch, capfd, there, expected):
    monkeypatch.setattr(quiet, "_GPUS", (str(Path(quiet.__file__).with_name(there)),))
    monkeypatch.setattr(quiet.jax, "devices", lambda: os.write(2, b"no driver\n"))
    start_backends()
    assert capfd.readouterr().err == expected
