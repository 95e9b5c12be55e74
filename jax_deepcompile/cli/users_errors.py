"""Errors of the user's own code, told without the frames of those who called it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib"))


def users_traceback(error: BaseException) -> str | None:
    """The user's lines that led to ``error``, and what it says; None where this package is to blame or nobody knows."""
    frames = traceback.extract_tb(error.__traceback__)
    known = [frame for frame in frames if not frame.filename.startswith("<") and not _is_librarys(frame)]
    users = [frame for frame in known if not frame.filename.startswith(_PACKAGE)]
    if not users or known[-1] is not users[-1]:
        return None
    return "".join([*traceback.format_list(users), f"{type(error).__name__}: {error}"])


def _is_librarys(frame: traceback.FrameSummary) -> bool:
    return str(Path(frame.filename).resolve()).startswith(_LIBRARIES)
