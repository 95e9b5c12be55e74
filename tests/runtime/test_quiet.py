"""What native libraries write to the standard error while they are loaded."""

from __future__ import annotations

import os
import sys

import pytest

from jax_deepcompile.runtime.quiet import silenced

pytestmark = pytest.mark.pure


def test_what_is_written_meanwhile_is_lost_and_nothing_else(capfd):
    with silenced():
        os.write(2, b"W0000 native")
    print("python", file=sys.stderr)
    assert capfd.readouterr().err == "python\n"


def test_errors_are_not_lost(capfd):
    with pytest.raises(ValueError, match="why"), silenced():
        raise ValueError("why")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"
