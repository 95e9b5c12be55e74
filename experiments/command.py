"""``deepcompile bench``: from the words of the line to an exit code."""

import sys
from collections.abc import Sequence

import tyro

from experiments.bench.command import run
from jax_deepcompile.training.config import REGISTRY


def bench(words: Sequence[str]) -> int:
    """Measures a benchmark; returns the exit code."""
    try:
        return tyro.cli(
            run, args=words, prog="deepcompile bench", config=(tyro.conf.FlagCreatePairsOff,), registry=REGISTRY
        )
    except OSError as error:  # of the file that is read or written
        print(f"deepcompile: {error}", file=sys.stderr)
        return 2
