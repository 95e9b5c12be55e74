"""Standard streams: pushed out, and pipes whose reader has gone, as ``head`` does."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import TextIO


def flush_streams() -> None:
    """Writes what Python still holds of standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()


def nobody_reads(stream: TextIO | None) -> bool:
    """Whether ``stream`` is a pipe that nobody reads any more. What is still in it is then lost without a word."""
    try:
        number = stream.fileno() if stream is not None else None
    except (OSError, ValueError):  # no file, or closed
        return False
    if number is None:
        return False
    polled = select.poll()
    polled.register(number, 0)
    if not any(event & select.POLLERR for _, event in polled.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
    return True
