"""What long work is at: a line on a terminal, and a log that is quiet unless somebody listens."""

from __future__ import annotations

import logging
import sys
import threading
from contextvars import ContextVar
from types import TracebackType

from rich.console import Console
from rich.text import Text

LOG = logging.getLogger("jax_deepcompile")
"""The package's log; at level INFO it tells of each candidate as it is tried."""

PATIENCE_S = 2.0
"""How long work may take before the terminal says what it is at."""


class Progress:
    """A context in which ``say`` goes to the log, and on a terminal to a line that is gone when the work is done.

    The line is there once the work has taken ``PATIENCE_S``, whatever it is in the middle of. Within another such
    context it is that one's line, after its title.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown = title
        self._around: Progress | None = None
        self._line: _Line | None = None

    def say(self, text: str) -> None:
        LOG.info("%s: %s", self._title, text)
        self._shown = f"{self._title}: {text}"
        self._draw(self._shown)

    def _draw(self, text: str) -> None:
        if self._around is not None:
            self._around._draw(f"{self._around._title}: {text}")
        elif self._line is not None:
            self._line.update(text)

    def __enter__(self) -> Progress:
        self._around = _INNERMOST.get()
        if self._around is None and sys.stderr.isatty():
            self._line = _Line()
        self._draw(self._shown)
        _INNERMOST.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _INNERMOST.set(self._around)
        if self._around is not None:
            self._around._draw(self._around._shown)
        if self._line is not None:
            self._line.stop()


_INNERMOST: ContextVar[Progress | None] = ContextVar("progress", default=None)


_MARK = 3
"""What the terminal shows before the text, in columns, and one that stays free."""


class _Line:
    """A line of the terminal that comes after a while, and goes."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("")
        self._timer = threading.Timer(PATIENCE_S, self._status.start)
        self._timer.daemon = True
        self._timer.start()

    def update(self, text: str) -> None:
        line = Text(text)
        line.truncate(self._console.width - _MARK, overflow="ellipsis")
        self._status.update(line)

    def stop(self) -> None:
        self._timer.cancel()
        self._timer.join()
        self._status.stop()
