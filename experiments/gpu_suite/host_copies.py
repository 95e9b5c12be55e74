"""Copies between device memory and pinned host memory: alone, beside kernels, beside one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

import jax_deepcompile as deepcompile
from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.meshes import one_device_mesh
from experiments.gpu_suite.sizes import Effort, Sizes
from experiments.gpu_suite.timing import seconds_a_call

TARGETS = {"to host": jax.memory.Space.Host, "from host": jax.memory.Space.Device}
"""Where a copy goes, by direction."""

BOTH_WAYS = "both ways at once"

KERNELS: dict[str, tuple[Callable, int]] = {"products": (jnp.matmul, 1), "sums": (jnp.add, 12)}
"""By kind, what computes, and how often for each product: products are bound by arithmetic, sums by device memory."""


def cases(sizes: Sizes) -> list[Row]:
    """``direction size_bytes how`` of each."""
    copied = [(f"beside {kernels}", sizes.host_copies.overlap_bytes) for kernels in KERNELS]
    copied += [("alone", size_bytes) for size_bytes in sizes.host_copies.sizes_bytes]
    return [
        {"direction": direction, "size_bytes": size_bytes, "how": how}
        for how, size_bytes in copied
        for direction in TARGETS
    ]


def rows(case: Row, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """The case with ``seconds bytes_per_s`` of a copy alone, or what ``_beside_kernels`` or ``_both_ways`` says."""
    measure = {"alone": _alone, BOTH_WAYS: _both_ways}.get(case["how"], _beside_kernels)
    yield case | measure(case, sizes)


def _alone(case: Row, sizes: Sizes) -> Row:
    """By ``jax.device_put``; the first copy, which allocates, does not count."""
    original, target = _original(case)
    seconds = [_copy_s(original, target) for _ in range(sizes.effort.samples + 1)]
    median_s = statistics.median(seconds[1:])
    return {"seconds": median_s, "bytes_per_s": case["size_bytes"] / median_s}


def _beside_kernels(case: Row, sizes: Sizes) -> Row:
    """``hidden`` is the part of the shorter one that the two together do not take longer than the longer one.

    XLA's schedule has a part in that, by which ``simulated_over_measured`` is of the two together.
    """
    original, _ = _original(case)
    kernel, count = KERNELS[case["how"].removeprefix("beside ")]
    size, space = sizes.host_copies.product_size, TARGETS[case["direction"]]
    # Scaled to keep the size of its values through any number of products.
    factor = (jax.random.normal(jax.random.key(0), (size, size)) / size**0.5).astype(jnp.bfloat16)

    def copy(x, factor):
        return jax.device_put(x, space)

    def compute(x, factor):
        result = factor
        for _ in range(count * sizes.host_copies.kernels):
            result = lax.optimization_barrier(kernel(result, factor))
        return result

    def both(x, factor):
        return copy(x, factor), compute(x, factor)

    args = original, factor
    copy_s, kernels_s, together_s = (_program_s(run, args, sizes.effort) for run in (copy, compute, both))
    simulated_s = deepcompile.simulate(jax.jit(both).lower(*args).compile(), one_device_mesh()).step_s
    return {
        "seconds": copy_s,
        "kernels_s": kernels_s,
        "together_s": together_s,
        "hidden": (copy_s + kernels_s - together_s) / min(copy_s, kernels_s),
        "simulated_over_measured": simulated_s / together_s,
    }


def _both_ways(case: Row, sizes: Sizes) -> Row:
    """Bytes a second each way alone, and of both together, in one program as a train step has them."""
    there, _ = _original(case | {"direction": "to host"})
    here, _ = _original(case | {"direction": "from host"})

    def to_host(there, here):
        return jax.device_put(there, TARGETS["to host"])

    def from_host(there, here):
        return jax.device_put(here, TARGETS["from host"])

    def both(there, here):
        return to_host(there, here), from_host(there, here)

    to_s, from_s, both_s = (_program_s(run, (there, here), sizes.effort) for run in (to_host, from_host, both))
    size_bytes = case["size_bytes"]
    return {
        "to_host_bytes_per_s": size_bytes / to_s,
        "from_host_bytes_per_s": size_bytes / from_s,
        "together_bytes_per_s": 2 * size_bytes / both_s,
    }


def _program_s(function: Callable, args: tuple, effort: Effort) -> float:
    return seconds_a_call(jax.jit(function), args, effort)


def _original(case: Row) -> tuple[jax.Array, Sharding]:
    """What is to be copied, and where to."""
    on_device = jnp.ones(case["size_bytes"] // 4, jnp.float32)
    device, host = on_device.sharding, on_device.sharding.with_memory_kind("pinned_host")
    if case["direction"] == "to host":
        return jax.block_until_ready(on_device), host
    return jax.block_until_ready(jax.device_put(on_device, host)), device


def _copy_s(original: jax.Array, target: Sharding) -> float:
    start = time.perf_counter()
    copied = jax.block_until_ready(jax.device_put(original, target))
    seconds = time.perf_counter() - start
    copied.delete()
    return seconds
