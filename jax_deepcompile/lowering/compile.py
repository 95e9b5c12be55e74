"""XLA options by target, one typed place."""

from __future__ import annotations

from typing import Any

import jax


def compile_options(platform: str) -> dict[str, Any]:
    """Options for compiling for ``platform``.

    Without a GPU nothing can be autotuned, and every dot would become a Triton fusion with a degenerate tile; cuBLAS
    calls are what a tuned compilation chooses for the large ones.
    """
    if platform == "cuda" and not _gpu_attached():
        return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
    return {}


def _gpu_attached() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False
