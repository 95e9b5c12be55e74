"""Ctrl-C and SIGTERM on the command line: the process is gone within two seconds, whatever it is in the middle of.

Python runs a signal's handler in the main thread, between two bytecodes: not while XLA compiles there or a device is
waited for. So the number of every signal goes down a pipe as well, to a thread that ends the process where the main
thread does not. It ends it without Python's and JAX's own clean-up, which would tear down what still runs.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

_GRACE_S = 1.2
"""For the main thread to unwind; the rest of two seconds is for ending, which a large process takes its time for."""

_SAYS_AFTER_S = 1.5
_PATIENCE_S = 300.0
"""For what is worth waiting for: longer than a step or a checkpoint takes that still comes to an end."""

_TICK_S = 0.05
_FLUSH_S = 0.2


class StoppedBySignal(KeyboardInterrupt):
    """What Ctrl-C and SIGTERM raise in the main thread."""

    def __init__(self, number: int):
        super().__init__(_NAMES[signal.Signals(number)])
        self.number = number


def exit_code(number: int) -> int:
    """What a shell reports of a program that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number


class Watch:
    """Ends the process on a signal.

    Attributes:
      waits_for: what the process is to finish first, for all to read; None to end it at once. While it is set, the main
        thread answers signals itself: the first one is said to have been heard, and the second ends the process.
      is_loading: nothing is under way yet that is to be unwound: a signal ends the process without an exception, which
        modules that are being loaded may print, ignore or make another of.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self.waits_for: str | None = None
        self.is_loading = False
        self._patience_s = patience_s
        self._ending = threading.Lock()
        self._raised: int | None = None

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Watches inside, if this is the main thread, which alone is handed signals.

        Raises:
          StoppedBySignal: a signal came, whatever became of what it raised in the main thread: an extension module that
            is being loaded makes an ImportError of it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        pipe_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._raise) for number in _NAMES}
        hook_before, sys.unraisablehook = sys.unraisablehook, _silent_about_signals(sys.unraisablehook)
        watching = threading.Thread(target=self._watch, args=(read,), name="deepcompile signals", daemon=True)
        watching.start()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(pipe_before)
            sys.unraisablehook = hook_before
            os.close(write)
            watching.join()
            os.close(read)
            if self._raised is not None:
                raise StoppedBySignal(self._raised) from None

    def end(self, number: int, how: str = "stopped") -> NoReturn:
        """Says that the signal ``number`` ended the process, and ends it."""
        self._ending.acquire()  # for good: who comes second waits for the end
        self._say(f"{_NAMES[signal.Signals(number)]}: {how}")
        os._exit(exit_code(number))

    def _raise(self, number: int, frame: FrameType | None) -> NoReturn:
        if self.is_loading:
            self.end(number)
        self._raised = number
        raise StoppedBySignal(number)

    def _watch(self, pipe: int) -> None:
        number = _next_signal(pipe, None)
        if not number:
            return
        grace_s, waited_s, name = _GRACE_S, 0.0, _NAMES[signal.Signals(number)]
        while (again := _next_signal(pipe, _TICK_S)) is None:
            if self.waits_for is None:
                grace_s -= _TICK_S
                if grace_s <= 0:
                    self.end(number)
                continue
            if waited_s <= _SAYS_AFTER_S < waited_s + _TICK_S:
                at_most = f"for at most {self._patience_s:.0f} s"
                self._say(f"{name}: waiting for {self.waits_for}, {at_most}; a second signal ends it at once")
            waited_s += _TICK_S
            if waited_s > self._patience_s:
                self.end(number, f"stopped without {self.waits_for}, which took more than {self._patience_s:.0f} s")
        if again:
            self.end(again, "stopped" if self.waits_for is None else f"stopped without {self.waits_for}")

    def _say(self, sentence: str) -> None:
        """Writes and flushes, but not for ever: nobody may be reading."""
        writing = threading.Thread(target=_write, args=(f"deepcompile: {sentence}\n",), daemon=True)
        writing.start()
        writing.join(_FLUSH_S)


def _silent_about_signals(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """A signal that comes in a callback, such as JAX's of the garbage collector, ends the process by the watch."""
    return lambda unraisable: None if isinstance(unraisable.exc_value, StoppedBySignal) else hook(unraisable)


def _next_signal(pipe: int, timeout_s: float | None) -> int | None:
    """The number of the next signal that ends processes; 0 at the end of the pipe, None if ``timeout_s`` pass first."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while select.select([pipe], [], [], None if until is None else max(until - time.monotonic(), 0.0))[0]:
        number = int.from_bytes(os.read(pipe, 1))
        if number == 0 or number in _NAMES:
            return number
    return None


def _write(text: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            if stream is sys.stderr:
                stream.write(text)
                stream.write("\x1b[?25h" if stream.isatty() else "")  # a live bar hides the cursor
            stream.flush()
