"""What a case finds."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One result, or what tells a case from others: what JSON can hold, by name; units in the names."""


def error_text(error: BaseException, limit: int = 600) -> str:
    """The class, the beginning of the message, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__}: {str(error).strip()[:limit]}{where}"
