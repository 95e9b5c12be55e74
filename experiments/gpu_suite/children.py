"""Worker processes: started with what they need to find this package, and ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
"""Where the packages ``experiments`` and ``models`` lie."""


@dataclass(frozen=True)
class Ended:
    """How processes that ran together ended.

    Attributes:
      problem: which failed and the end of what it had to say, or that time was over; empty if all went well.
      seconds: from the first one's start to the last one's end.
    """

    problem: str
    seconds: float


def run_together(
    commands: Sequence[Sequence[str]],
    seconds: float,
    folder: Path,
    environments: Sequence[Mapping[str, str]] | None = None,
    own_session: bool = True,
    patience_s: float = 3.0,
) -> Ended:
    """Runs ``python -m experiments.gpu_suite.worker`` once for each of ``commands``, all at once.

    Args:
      commands: the workers' arguments.
      seconds: until those that still run are killed, with all they started.
      folder: for what they print.
      environments: of each, what it has beyond this process's.
      own_session: whether each worker is ended with all that it started; if not, it is ended with this process's group.
      patience_s: that the others get when one has failed.
    """
    begun = time.monotonic()
    runs: list[tuple[subprocess.Popen, Path]] = []
    with contextlib.ExitStack() as opened:
        try:
            for index, command in enumerate(commands):
                more = environments[index] if environments else {}
                printed = folder / f"worker_{index}.txt"
                stream = opened.enter_context(printed.open("wb"))
                runs.append((_start(command, more, stream, own_session), printed))
            problem = _wait(runs, begun + seconds, seconds, patience_s)
        finally:
            for process, _ in runs:
                _end(process, own_session)
    return Ended(problem, time.monotonic() - begun)


def _wait(runs: Sequence[tuple[subprocess.Popen, Path]], end_s: float, seconds: float, patience_s: float) -> str:
    problem = ""
    while any(process.poll() is None for process, _ in runs):
        failed = [(process, printed) for process, printed in runs if process.poll() not in (None, 0)]
        if failed and not problem:
            problem = _said(*failed[0])
            end_s = min(end_s, time.monotonic() + patience_s)
        if time.monotonic() > end_s:
            return problem or f"killed, for it did not end within {seconds:.0f} s"
        time.sleep(0.02)
    return problem or next((_said(process, printed) for process, printed in runs if process.returncode), "")


def _start(command: Sequence[str], more: Mapping[str, str], printed: IO[bytes], own_session: bool) -> subprocess.Popen:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.gpu_suite.worker", *command],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": os.pathsep.join(paths), **more},
        stdout=printed,
        stderr=subprocess.STDOUT,
        start_new_session=own_session,
    )


def _end(process: subprocess.Popen, own_session: bool) -> None:
    """Kills the process, if it still runs."""
    if process.poll() is None:
        if own_session:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()


def _said(process: subprocess.Popen, printed: Path, limit: int = 1500) -> str:
    text = printed.read_text(errors="replace").strip()
    return f"exit status {process.returncode}: ...{text[-limit:]}"
