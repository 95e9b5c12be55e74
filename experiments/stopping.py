"""Ctrl-C and SIGTERM as a request to stop after the step under way, when the state is whole and can be saved."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """While entered, the first signal sets ``requested``; a second one does what it would have done without us."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python hands signals to the main thread only
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
