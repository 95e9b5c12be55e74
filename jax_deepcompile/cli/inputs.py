"""Files that options name, read."""

from __future__ import annotations

from pathlib import Path

from jax_deepcompile import errors
from jax_deepcompile.runtime.modules import nearest_name


def text_in(file: Path, option: str, written_by: str) -> str:
    """What ``file`` holds, as text.

    Args:
      option: that names it.
      written_by: the command that makes such files.

    Raises:
      CannotReadError: there is none, with the nearest of its folder, or nobody could read it.
    """
    try:
        return file.read_text(errors="replace")
    except OSError as error:
        problem = _no_such_file(file) if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise errors.CannotReadError(f"{option} {file}", problem, written_by) from error


def _no_such_file(file: Path) -> str:
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    nearest = nearest_name(file.name, (each.name for each in file.parent.iterdir() if each.is_file()))
    return "there is no such file" + (f"; the nearest is {file.parent / nearest}" if nearest else "")
