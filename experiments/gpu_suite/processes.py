"""Work in processes of its own, which send what they find row by row and are ended for certain."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from experiments.gpu_suite.cases import Row, error_text

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    printed: Path
    own_session: bool

    def end(self) -> None:
        """Kills the process, if it still runs, with all that it started where it has a session of its own."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                if self.own_session:
                    os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.kill()
        self.process.join()

    def problem(self, limit: int = 1500) -> str:
        """How it failed and the end of what it had to say; empty if it did not."""
        if not self.process.exitcode:
            return ""
        text = self.printed.read_text(errors="replace").strip()
        return f"exit status {self.process.exitcode}: ...{text[-limit:]}"


def run_together(
    work: Callable[..., Iterable[Row]],
    arguments: Sequence[tuple],
    seconds: float,
    environments: Sequence[Mapping[str, str]] | None = None,
    own_session: bool = True,
    patience_s: float = 3.0,
) -> tuple[list[Row], str]:
    """Runs ``work`` once for each of ``arguments``, all at once.

    Args:
      work: a function of a module, for processes of their own to import.
      arguments: of each process.
      seconds: until those that still run are killed, with all they started.
      environments: of each, what it has beyond this process's by the time that ``work`` runs.
      own_session: whether each worker is ended with all that it started; if not, it is ended with this process's group.
      patience_s: that the others get when one has failed.

    Returns:
      All rows that they found, and which failed first and why, or that time was over; empty if all went well.
    """
    end_s, rows, problem = time.monotonic() + seconds, [], ""
    with tempfile.TemporaryDirectory(prefix="deepcompile_bench_") as folder:
        workers: dict[Any, _Worker] = {}
        try:
            for index, each in enumerate(arguments):
                printed, more = Path(folder) / f"{index}.txt", environments[index] if environments else {}
                receiver, sender = _SPAWN.Pipe(duplex=False)
                process = _SPAWN.Process(target=_work, args=(sender, printed, own_session, more, work, each))
                process.start()
                sender.close()  # so that the pipe ends with the process
                workers[receiver] = _Worker(process, printed, own_session)
            running = dict(workers)
            while running:
                ready = connection.wait(running, timeout=max(0.0, end_s - time.monotonic()))
                if not ready:
                    return rows, problem or f"killed, for it did not end within {seconds:.0f} s"
                for receiver in ready:
                    found = _received(receiver, running, end_s)
                    if isinstance(found, dict):
                        rows.append(found)
                    elif found and not problem:
                        problem = found
                        end_s = min(end_s, time.monotonic() + patience_s)
        finally:
            for worker in workers.values():
                worker.end()
    return rows, problem


def _received(receiver: Any, running: dict[Any, _Worker], end_s: float) -> Row | str:
    """The next row, or why the worker has failed; at its end it leaves ``running``."""
    try:
        return receiver.recv()
    except EOFError:
        worker = running.pop(receiver)
        worker.process.join(max(0.0, end_s - time.monotonic()))
        return worker.problem()


def _work(
    sender: Any,
    printed: Path,
    own_session: bool,
    more: Mapping[str, str],
    work: Callable[..., Iterable[Row]],
    arguments: tuple,
) -> None:
    """What a worker runs: all that is printed, by libraries too, goes to ``printed``; an error ends its rows."""
    if own_session:
        os.setsid()
    with printed.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(more)
    try:
        for row in work(*arguments):
            sender.send(_plain(row))
    except Exception as error:
        sender.send(error_text(error))


def _plain(value: Any) -> Any:
    """Numbers that JSON does not have become text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
