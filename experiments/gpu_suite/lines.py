"""JSON values in a file, one a line, that any process can add to and any can read meanwhile."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def append(path: Path, value: Any) -> None:
    """Adds ``value``; numbers that JSON does not have become text."""
    with path.open("a") as file:
        file.write(json.dumps(_plain(value), allow_nan=False) + "\n")


def read(path: Path) -> list[Any]:
    """All values; none if there is no file. A last line that was cut short is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
