"""``deepcompile new``: a starting point of one's own."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro

from jax_deepcompile import errors


def new(folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]) -> str:
    """Writes a model, its step, a config, a test and a notebook to start from.

    Args:
      folder: where to; it is made if it is not there.

    Raises:
      WouldOverwriteError: a file of these names is there; nothing is written.
    """
    templates = sorted((resources.files("jax_deepcompile.cli") / "templates").iterdir(), key=lambda each: each.name)
    files = {folder / each.name.removesuffix(".txt"): each.read_text() for each in templates}
    if there := [path for path in files if path.exists()]:
        raise errors.WouldOverwriteError(there)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text)
    return "\n".join(
        [
            *(f"wrote {path}" for path in files),
            f"next: cd {folder} && deepcompile train config.py:CONFIG --out runs/first",
        ]
    )
