"""Where experiments are: the repository's, which are not installed, and the user's."""

import sys
from pathlib import Path

from jax_deepcompile.runtime.modules import find_first


def experiment_folders(given: Path | None) -> list[Path]:
    """Where experiments are: the repository's folder, if it is found, and the ``given`` one, whose are found before.

    What they import is found from now on.

    Raises:
      NotADirectoryError: the given one is not there.
    """
    own = None if given is None else given.resolve()
    if own is not None and not own.is_dir():
        raise NotADirectoryError(f"--experiments {given}: there is no such folder")
    repositorys = next(filter(is_the_repositorys, looked_in(own)), None)
    if repositorys is not None:
        sys.path.append(str(repositorys.parent))  # last: the user's `models` and `experiments` are the user's
    if own is not None:
        find_first(Path.cwd())
    return [folder for folder in (repositorys, own) if folder is not None]


def looked_in(own: Path | None) -> list[Path]:
    """Where the repository's may be."""
    return [folder for folder in (own, _beside_the_package(), Path.cwd() / "experiments") if folder is not None]


def _beside_the_package() -> Path:
    """Where a checkout has them that is installed with ``pip install -e``."""
    return Path(__file__).parents[2] / "experiments"


def is_the_repositorys(folder: Path) -> bool:
    """Whether ``folder`` is no package of somebody else's that has the same name."""
    return folder.name == "experiments" and (folder / "command.py").is_file() and (folder.parent / "models").is_dir()
