"""Whether files can be written, seen before what goes into them takes its time."""

from __future__ import annotations

import os
from pathlib import Path

from jax_deepcompile import errors


def require_writable(option: str, file: Path | None, *, makes_folders: bool = False) -> None:
    """Raises CannotWriteError where ``option`` names a ``file`` that nobody could write.

    Args:
      makes_folders: whoever writes it.
    """
    if file is None:
        return
    above = [folder for folder in file.parents if os.path.exists(folder)] if makes_folders else [file.parent]
    problem = _problem(file, above[0])
    if problem is not None:
        raise errors.CannotWriteError(f"{option} {file}", problem)


def _problem(file: Path, folder: Path) -> str | None:
    if os.path.isdir(file):
        return "it is a folder"
    if not os.path.exists(folder):
        return f"there is no folder {folder}"
    if not os.path.isdir(folder):
        return f"{folder} is no folder"
    if not os.access(file if os.path.exists(file) else folder, os.W_OK):
        return "you may not write there"
    return None
