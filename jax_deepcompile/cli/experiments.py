"""``deepcompile train`` and ``bench``: finds what the rest of the line is about."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jax_deepcompile.cli.folders import experiment_folders, is_the_repositorys, looked_in
from jax_deepcompile.runtime.interrupts import Watch
from jax_deepcompile.runtime.modules import find_first

_EXTRAS = {"grain": "train", "orbax": "train", "pytest": "test", "tensorboardX": "train"}
"""Which extra installs it, by the name that Python imports."""


def train(words: Sequence[str], watch: Watch) -> int:
    """Trains what the rest of the line says.

    Returns:
      The exit code: 2 after one sentence where what that needs is not installed.
    """
    given, words = own_folder(words)
    try:
        folders = experiment_folders(given)
    except NotADirectoryError as error:
        return _mistake(str(error))

    def run() -> int:
        from jax_deepcompile.cli.train import train

        return train(words, folders, watch)

    return _with_extras("train", run)


def bench(words: Sequence[str]) -> int:
    """Runs what the rest of the line says.

    Returns:
      The exit code: 2 after one sentence where there are no benchmarks, or what they need is not installed.
    """
    given, words = own_folder(words)
    looked = looked_in(None if given is None else given.resolve())
    found = next(filter(is_the_repositorys, looked), None)
    if found is None:
        return _mistake(
            "there are no benchmarks to run: they belong to the repository and are not installed with the package. "
            f"Looked in {', '.join(map(str, looked))}. Run this in a checkout of the repository, or give its folder: "
            "--experiments DIR"
        )
    find_first(found.parent)
    return _with_extras("bench", lambda: importlib.import_module("experiments.command").bench(words))


def own_folder(words: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """What ``--experiments`` says, and the other words."""
    parser = argparse.ArgumentParser(prog="deepcompile", add_help=False, allow_abbrev=False)
    parser.add_argument("--experiments", metavar="DIR", type=Path)
    said, others = parser.parse_known_args(words)
    return said.experiments, others


def _with_extras(command: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _mistake(f"{command} needs {error.name}: pip install 'jax-deepcompile[{extra}]'")


def _mistake(sentence: str) -> int:
    print(f"deepcompile: {sentence}", file=sys.stderr)
    return 2
