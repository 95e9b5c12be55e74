"""Native libraries that write to the standard streams, whatever level their logs have."""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import jax

from jax_deepcompile.runtime.pipes import flush_streams

STDOUT, _STDERR = 1, 2
_GPUS = ("/dev/nvidia[0-9]*", "/dev/dxg")
"""Where Linux, and Windows' Linux, has NVIDIA's GPUs."""


@contextmanager
def silenced(stream: int = _STDERR) -> Iterator[None]:
    """What anybody writes to the process's standard error, or another ``stream``, is lost; exceptions are not."""
    _flush()
    kept = os.dup(stream)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream)
        yield
    finally:
        _flush()
        os.dup2(kept, stream)
        os.close(kept)


def _flush() -> None:
    """Python's buffers and the C library's."""
    flush_streams()
    ctypes.CDLL(None).fflush(None)


def start_backends() -> None:
    """Starts JAX's backends; where there is no GPU, without what JAX's CUDA plugin says about that.

    Raises:
      RuntimeError: there is no backend such as ``JAX_PLATFORMS`` asks for.
    """
    with nullcontext() if any(map(glob.glob, _GPUS)) else silenced():
        jax.devices()
