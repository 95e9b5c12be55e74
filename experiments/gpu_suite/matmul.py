"""Seconds of matrix products by shape, element type and form.

Each is measured twice: by cuBLAS, which is quick to compile, and, as far as time allows, by whatever XLA chooses.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.sizes import Sizes
from experiments.gpu_suite.timing import seconds_an_operation

CONTRACTED = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}
"""By form, the dimension of each factor that is summed over."""

COMPILERS = {"cublas": {"xla_gpu_enable_triton_gemm": False}, "default": None}
"""XLA's options by what computes the product."""

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}


def cases(sizes: Sizes) -> list[Row]:
    """``m n k dtype form compiler`` of each."""
    listed = (
        ("bf16", "nn", sizes.matmul.shapes),
        ("f32", "nn", sizes.matmul.float32_shapes),
        ("bf16", "nt", sizes.matmul.transposed_shapes),
        ("bf16", "tn", sizes.matmul.transposed_shapes),
    )
    return [
        {"m": m, "n": n, "k": k, "dtype": dtype, "form": form, "compiler": compiler}
        for compiler in COMPILERS
        for dtype, form, shapes in listed
        for m, n, k in shapes
    ]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """The case with ``seconds`` and ``flops_per_s``."""
    m, n, k, form = case["m"], case["n"], case["k"], case["form"]
    left_axis, right_axis = CONTRACTED[form]
    left = _matrix((k, m) if form == "tn" else (m, k), case["dtype"], 0)
    right = _matrix((n, k) if form == "nt" else (k, n), case["dtype"], 1)
    flops = 2 * m * n * k
    took_s = seconds_an_operation(
        lambda a, b: lax.dot_general(a, b, (((left_axis,), (right_axis,)), ((), ()))),
        (left, right),
        flops / sizes.matmul.expected_flops_per_s,
        sizes.effort,
        COMPILERS[case["compiler"]],
    )
    yield case | {"seconds": took_s, "flops_per_s": flops / took_s}


def _matrix(shape: tuple[int, int], dtype: str, seed: int) -> jax.Array:
    """Random, for a GPU draws less power and runs faster on zeros."""
    return jax.random.normal(jax.random.key(seed), shape, _DTYPES[dtype])
