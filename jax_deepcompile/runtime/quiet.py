"""Native libraries that write to the standard error as they are loaded, whatever level their logs have."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STDERR = 2


@contextmanager
def silenced() -> Iterator[None]:
    """What anybody writes to the process's standard error meanwhile is lost; exceptions are not."""
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
