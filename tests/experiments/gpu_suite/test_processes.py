"""Worker processes: what they found is kept, however they end, and they do end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.processes import WorkersFailedError, rows_of

pytestmark = pytest.mark.pure


def rows(end: str, folder: Path) -> Iterator[Row]:
    """Two rows, and an end."""
    yield {"shape": (1, 2.5)}
    yield {"variable": os.environ.get("OF_THE_TEST")}
    if end == "error":
        raise ValueError("no more")
    if end == "crash":
        sys.stderr.write("out of memory")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if end == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (folder / "child").write_text(str(child.pid))
        time.sleep(60)


def test_all_rows_are_found(tmp_path):
    assert list(rows_of(rows, [("well", tmp_path)], 60.0)) == [{"shape": [1, 2.5]}, {"variable": None}]


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("error", r"exit status 1: \.\.\.(.|\n)*ValueError: no more$"),
        ("crash", r"exit status -11: \.\.\.out of memory$"),
        ("hang", "killed, for it did not end within 5 s"),
    ],
)
def test_rows_are_kept_however_a_worker_ends(end, problem, tmp_path):
    found = rows_of(rows, [(end, tmp_path)], 5.0 if end == "hang" else 60.0)
    assert [next(found), next(found)] == [{"shape": [1, 2.5]}, {"variable": None}]
    with pytest.raises(WorkersFailedError, match=problem):
        next(found)
    if end == "hang":
        time.sleep(0.2)
        state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z", "ended with all that it started"


def test_a_worker_that_fails_ends_the_others_too(tmp_path):
    begun = time.monotonic()
    environments = [{"OF_THE_TEST": "first"}, {"OF_THE_TEST": "second"}]
    found = rows_of(rows, [("hang", tmp_path), ("error", tmp_path)], 60.0, environments)
    seen = []
    with pytest.raises(WorkersFailedError, match="ValueError: no more"):
        seen += found  # as far as they come
    assert {row.get("variable") for row in seen} >= {"second"}
    assert time.monotonic() - begun < 30
