"""Bytes a second of kernels that compute next to nothing, and what the shortest kernel and the gap after it take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.sizes import Sizes
from experiments.gpu_suite.timing import seconds_a_call, seconds_an_operation
from jax_deepcompile.profilers.trace import traced

KERNELS: dict[str, tuple[Callable, float]] = {
    "copy": (jnp.negative, 2.0),  # XLA makes a true copy a memcpy of the driver's, which is no kernel
    "add": (lambda x: x[0] + x[1], 1.5),
    "cast": (lambda x: x.astype(jnp.bfloat16), 1.5),
    "softmax": (jax.nn.softmax, 2.0),
    "reduction": (lambda x: x.sum(axis=-1), 1.0),
    "transpose": (lambda x: x.T, 2.0),
}
"""By kind, the function of a float32 matrix and the bytes it reads and writes for each byte of it."""

GRAPHS = {"by default": None, "without CUDA graphs": {"xla_gpu_enable_command_buffer": ""}}
"""XLA's options by how tiny kernels are launched."""


def cases(sizes: Sizes) -> list[Row]:
    """``kind`` of each, how tiny ones are ``launched``, ``operand_bytes size_bytes`` of the others."""
    return [{"kind": "tiny", "launched": launched} for launched in GRAPHS] + [
        {"kind": kind, "operand_bytes": operand_bytes, "size_bytes": int(operand_bytes * KERNELS[kind][1])}
        for operand_bytes in sizes.memory.sizes_bytes
        for kind in KERNELS
    ]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """The case with ``seconds`` and ``bytes_per_s``; of tiny kernels with what ``_tiny`` says."""
    yield case | (_tiny(case["launched"], sizes) if case["kind"] == "tiny" else _measure(case, sizes))


def _measure(case: Row, sizes: Sizes) -> Row:
    function, _ = KERNELS[case["kind"]]
    columns = sizes.memory.columns
    matrix = jnp.ones((case["operand_bytes"] // 4 // columns, columns), jnp.float32)
    operand = matrix.reshape(2, -1, columns) if case["kind"] == "add" else matrix
    expected_s = case["size_bytes"] / sizes.memory.expected_bytes_per_s
    seconds = seconds_an_operation(function, (operand,), expected_s, sizes.effort)
    return {"seconds": seconds, "bytes_per_s": case["size_bytes"] / seconds}


def _tiny(launched: str, sizes: Sizes) -> Row:
    """Tiny kernels in a row, each waiting for the one before.

    Returns:
      ``period_s`` from one start to the next; ``kernel_s`` of one by the profiler's trace and the rest,
      ``gap_s``; both are None where there is no trace.
    """
    count = sizes.memory.tiny_kernels

    def tiny_kernels(x):
        for _ in range(count):
            x = lax.optimization_barrier(x + 1.0)
        return x

    run = jax.jit(tiny_kernels, compiler_options=GRAPHS[launched])
    x = jnp.zeros(8)
    period_s = seconds_a_call(run, (x,), sizes.effort) / count
    _, trace = traced(lambda: run(x), "jit_tiny_kernels")
    each_s = [seconds / trace.events[key] for key, seconds in trace.seconds.items()]
    kernel_s = statistics.median(each_s) if each_s else None
    gap_s = None if kernel_s is None else max(0.0, period_s - kernel_s)
    return {"kernels": count, "period_s": period_s, "kernel_s": kernel_s, "gap_s": gap_s}
