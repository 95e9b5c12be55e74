"""Work in processes of its own, which are ended for certain; what they found is kept, however they end."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from experiments.gpu_suite.cases import Row

_SPAWN = multiprocessing.get_context("spawn")


class WorkersFailedError(Exception):
    """A worker process failed or was killed."""


def rows_of(
    work: Callable[..., Iterable[Row]],
    arguments: Sequence[tuple],
    seconds: float,
    environments: Sequence[Mapping[str, str]] = ({},),
) -> Iterator[Row]:
    """The rows that ``work`` yields, run once for each of ``arguments``, all at once.

    Args:
      work: a function of a module, for processes of their own to import.
      arguments: of each process.
      seconds: until those that still run are killed, with all they started; so are the others when one fails.
      environments: of each, what it has beyond this process's by the time that ``work`` runs.

    Raises:
      WorkersFailedError: after all rows, which failed first and what it had to say, or that time was over.
    """
    with tempfile.TemporaryDirectory(prefix="deepcompile_bench_") as folder:
        workers: dict[Path, SpawnProcess] = {}
        try:
            for index, (each, more) in enumerate(zip(arguments, environments, strict=True)):
                found = Path(folder) / str(index)
                workers[found] = _SPAWN.Process(target=_work, args=(found, more, work, each))
                workers[found].start()
            problem = _problem(workers, seconds)
        finally:
            for process in workers.values():
                _end(process)
        for found in workers:
            whole = found.read_text().split("\n")[:-1] if found.exists() else ()
            yield from map(json.loads, whole)
    if problem:
        raise WorkersFailedError(problem)


def _problem(workers: Mapping[Path, SpawnProcess], seconds: float) -> str:
    """Waits until all have ended or one has failed; says how it failed, or nothing."""
    end_s, running = time.monotonic() + seconds, dict(workers)
    while running:
        waited_for = [process.sentinel for process in running.values()]
        ended = connection.wait(waited_for, timeout=max(0.0, end_s - time.monotonic()))
        if not ended:
            return f"killed, for it did not end within {seconds:.0f} s"
        for found, process in workers.items():
            if process.sentinel in ended:
                process.join()
                del running[found]
            if process.exitcode:
                text = _printed(found).read_text(errors="replace").strip() if _printed(found).exists() else ""
                return f"exit status {process.exitcode}: ...{text[-1500:]}"
    return ""


def _printed(found: Path) -> Path:
    """Where a worker's output goes, beside its rows."""
    return found.with_suffix(".txt")


def _end(process: SpawnProcess) -> None:
    """Kills the process, if it still runs, with all that it started."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
    process.join()


def _work(found: Path, more: Mapping[str, str], work: Callable[..., Iterable[Row]], arguments: tuple) -> None:
    """What a worker runs, in a session of its own: all that is printed, by libraries too, goes to a file."""
    os.setsid()
    with _printed(found).open("wb") as stream, found.open("w") as rows:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        os.environ.update(more)
        for row in work(*arguments):
            rows.write(json.dumps(row) + "\n")
            rows.flush()
