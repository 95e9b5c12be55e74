"""Work in threads that the waiting thread can leave at any time.

Python honours Ctrl-C in the main thread, and only between two bytecodes: not while that thread is inside XLA, nor while
it waits for a pool of threads to shut down. Here the main thread waits where it can be interrupted, and leaves what is
under way behind.
"""

import atexit
import contextlib
import operator
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from itertools import takewhile
from typing import TypeVar

from jax_deepcompile.runtime.pipes import flush_streams

T = TypeVar("T")


def in_parallel(works: Sequence[Iterable[T]]) -> list[list[T]]:
    """What each of ``works`` yields, as many worked on at a time as there are cores.

    If the wait is interrupted, or one of them raises, that is raised at once: works that have not begun never do, and
    those under way end with the item they are at.
    """
    results: list[Future[list[T]]] = [Future() for _ in works]
    waiting: queue.SimpleQueue[tuple[Iterable[T], Future[list[T]]]] = queue.SimpleQueue()
    for each in zip(works, results, strict=True):
        waiting.put(each)
    abandoned = threading.Event()

    def work_off() -> None:
        with contextlib.suppress(queue.Empty):
            while not abandoned.is_set():
                work, result = waiting.get_nowait()
                try:
                    result.set_result(list(takewhile(lambda _: not abandoned.is_set(), work)))
                except BaseException as error:
                    result.set_exception(error)

    try:
        for _ in range(min(len(works), os.cpu_count() or 1)):
            threading.Thread(target=work_off, name=_WORKER, daemon=True).start()
        wait(results, return_when=FIRST_EXCEPTION)
        for failed in (each for each in results if each.done() and each.exception()):
            failed.result()
        return [each.result() for each in results]
    finally:
        abandoned.set()


def results_of(calls: Iterable[Callable[[], T]]) -> list[T]:
    """What each of ``calls`` returns, made as ``in_parallel`` works."""
    return [result for (result,) in in_parallel([map(operator.call, [call]) for call in calls])]


def interruptible(call: Callable[[], T]) -> T:
    """What ``call`` returns, from a thread of its own, so that waiting for it can be interrupted."""
    return results_of([call])[0]


_WORKER = "deepcompile worker"
"""The name of threads that the interpreter does not wait for before ``_outlast_workers`` has its say."""

_PATIENCE_S = 1.0
"""How long an interrupted program waits for what it left behind: it is to be gone within two seconds."""


@atexit.register
def _outlast_workers() -> None:
    """Keeps the interpreter from being torn down under a compilation that was left behind, which would crash it.

    A program that Ctrl-C ends does not wait for long: it ends as Python ends it, by the signal itself. One that caught
    ``KeyboardInterrupt`` waits to the end, or to the next Ctrl-C: its exit code is known to the interpreter alone.
    """
    workers = [each for each in threading.enumerate() if each.name == _WORKER]
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    until = time.monotonic() + _PATIENCE_S
    try:
        for each in workers:
            each.join(max(until - time.monotonic(), 0.0) if interrupted else None)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted and any(each.is_alive() for each in workers):
        flush_streams()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
