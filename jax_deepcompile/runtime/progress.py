"""What long work is at: a line on a terminal, and a log that is quiet unless somebody listens."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

LOG = logging.getLogger("jax_deepcompile")
"""The package's log; at level INFO it tells of each candidate as it is tried."""

PATIENCE_S = 2.0
"""How long work may take before the terminal says what it is at."""


class Progress:
    """A context in which ``say`` goes to the log, and on a terminal to a line that is gone when the work is done."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._began_s = time.monotonic()
        self._status: Status | None = None

    def say(self, text: str) -> None:
        LOG.info("%s: %s", self._title, text)
        if self._status is None and sys.stderr.isatty() and time.monotonic() - self._began_s > PATIENCE_S:
            self._status = Console(stderr=True).status("")
            self._status.start()
        if self._status is not None:
            self._status.update(f"{self._title}: {text}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
