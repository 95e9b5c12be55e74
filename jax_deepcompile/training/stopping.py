"""Ctrl-C and SIGTERM as a request to stop after the step under way, when the state is whole and can be saved."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Self

import jax

from jax_deepcompile.runtime.interrupts import Watch


class StopRequest:
    """While entered, the first signal makes ``is_due`` true; a second one does what it would have done without us.

    Args:
        agreed: step -> whether the processes of the job have agreed to stop after it. One that stops alone
            leaves the others waiting for it in a collective, so with several this decides and signals are left alone.
        watch: who is told what a stop waits for, so that it says so and bounds it; none where nobody watches.

    Attributes:
        signal: what asked to stop; none if nothing did.
    """

    def __init__(self, agreed: Callable[[int], bool], watch: Watch | None = None) -> None:
        self._agreed = agreed
        self._is_alone = jax.process_count() == 1
        self._watch = watch if self._is_alone else None
        self._previous: dict[int, signal._HANDLER] = {}
        self.signal: signal.Signals | None = None

    def is_due(self, step: int) -> bool:
        """Whether to stop after ``step``; every process gets the same answer."""
        if self._is_alone:
            return self.signal is not None
        agreed = self._agreed(step)
        if agreed:
            self.signal = signal.SIGTERM
        return agreed

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """A stop that is asked for inside waits for ``what`` instead of the step under way."""
        self._wait_for(what)
        try:
            yield
        finally:
            self._wait_for(_STEP)

    def __enter__(self) -> Self:
        # Python hands signals to the main thread only.
        if self._is_alone and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
            self._wait_for(_STEP)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait_for(None)
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _wait_for(self, what: str | None) -> None:
        if self._watch is not None:
            self._watch.waits_for = what

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


_STEP = "the step under way and its checkpoint"
