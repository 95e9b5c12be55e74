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
    known = [frame for frame in frames if not frame.filename.startswith("<") and not is_librarys(frame.filename)]
    users = [frame for frame in known if not frame.filename.startswith(_PACKAGE)]
    if not users or known[-1] is not users[-1]:
        return None
    return "".join([*traceback.format_list(users), f"{type(error).__name__}: {error}"])


def syntax_error(error: BaseException) -> str | None:
    """What Python says of a file of the user's that is no Python; None where ``error`` is another."""
    file = error.filename if isinstance(error, SyntaxError) else None
    if file is None or file.startswith("<") or is_librarys(file):
        return None
    return "".join(traceback.format_exception_only(error)).rstrip()


def is_librarys(file: str) -> bool:
    """Whether it is installed, and nobody's who works here."""
    return str(Path(file).resolve()).startswith(_LIBRARIES)
