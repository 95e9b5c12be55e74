"""What a case finds."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
"""One result, or what tells a case from others: what JSON can hold, by name; units in the names."""


def error_text(error: BaseException, limit: int = 600) -> str:
    """The class and the beginning of the message."""
    return f"{type(error).__name__}: {str(error).strip()[:limit]}"
