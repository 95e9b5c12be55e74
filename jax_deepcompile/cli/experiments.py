"""``deepcompile train`` and ``bench`` belong to the repository's experiments: finds those, which are not installed."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from jax_deepcompile.runtime.interrupts import Watch

_EXTRAS = {"grain": "train", "orbax": "train", "pytest": "test", "tensorboardX": "train"}
"""Which extra installs it, by the name that Python imports."""


@dataclass(frozen=True)
class _Where:
    experiments: Path | None = None


def run(command: Literal["train", "bench"], words: Sequence[str], watch: Watch) -> int:
    """Runs ``command`` of the experiments with the rest of the line.

    Returns:
      The exit code: 2 after one sentence where there are no experiments, or what they need is not installed.
    """
    where, words = tyro.cli(_Where, args=words, return_unknown_args=True, add_help=False)
    own = None if where.experiments is None else where.experiments.resolve()
    if own is not None and not own.is_dir():
        return _mistake(f"--experiments {where.experiments}: there is no such folder")
    looked = [folder for folder in (own, _beside_the_package(), Path.cwd() / "experiments") if folder is not None]
    found = next(filter(_is_the_repositorys, looked), None)
    if found is None:
        return _mistake(
            f"there are no experiments to {command}: they belong to the repository and are not installed with the "
            f"package. Looked in {', '.join(map(str, looked))}. Run this in a checkout of the repository, or give its "
            "folder: --experiments DIR"
        )
    sys.path[:0] = [str(found.parent)] if own in (None, found) else [str(found.parent), str(own)]
    try:
        module = importlib.import_module("experiments.command")
        return getattr(module, command)(words, own if own != found else None, watch)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _mistake(f"{command} needs {error.name}: pip install 'jax-deepcompile[{extra}]'")


def _beside_the_package() -> Path:
    """Where a checkout has them that is installed with ``pip install -e``."""
    return Path(__file__).parents[2] / "experiments"


def _is_the_repositorys(folder: Path) -> bool:
    """Whether ``folder`` is no package of somebody else's that has the same name."""
    return folder.name == "experiments" and (folder / "command.py").is_file() and (folder.parent / "models").is_dir()


def _mistake(sentence: str) -> int:
    print(f"deepcompile: {sentence}", file=sys.stderr)
    return 2
