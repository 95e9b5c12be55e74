"""Ctrl-C and SIGTERM as a request to stop after the step under way, when the state is whole and can be saved."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

import jax


class StopRequest:
    """While entered, the first signal makes ``is_due`` true; a second one does what it would have done without us.

    Args:
        agreed: step -> whether the processes of the job have agreed to stop after it. One that stops alone
            leaves the others waiting for it in a collective, so with several this decides and signals are left alone.
    """

    def __init__(self, agreed: Callable[[int], bool]) -> None:
        self._agreed = agreed
        self._is_alone = jax.process_count() == 1
        self._requested = False
        self._previous: dict[int, signal._HANDLER] = {}

    def is_due(self, step: int) -> bool:
        """Whether to stop after ``step``; every process gets the same answer."""
        return self._requested if self._is_alone else self._agreed(step)

    def __enter__(self) -> Self:
        # Python hands signals to the main thread only.
        if self._is_alone and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
