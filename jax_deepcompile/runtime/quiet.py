"""Native libraries that write to the standard error as they are loaded, whatever level their logs have."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import jax

_STDERR = 2
_GPUS = ("/dev/nvidia[0-9]*", "/dev/dxg")
"""Where Linux, and Windows' Linux, has NVIDIA's GPUs."""


@contextmanager
def silenced() -> Iterator[None]:
    """What anybody writes to the process's standard error meanwhile is lost; exceptions are not."""
    sys.stderr.flush()
    kept = os.dup(_STDERR)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


def start_backends() -> None:
    """Starts JAX's backends; where there is no GPU, without what JAX's CUDA plugin says about that.

    Raises:
      RuntimeError: there is no backend such as ``JAX_PLATFORMS`` asks for.
    """
    with nullcontext() if any(map(glob.glob, _GPUS)) else silenced():
        jax.devices()
