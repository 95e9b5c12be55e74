"""XLA options by target, and those that planning chooses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_deepcompile import _jax_compat
from jax_deepcompile.lowering.xla_options import (
    AUTOTUNE_LEVEL,
    COPY_FUSION,
    COPY_LIMIT,
    CUDA_GRAPHS,
    DISABLED_PASSES,
    DOUBLE_BUFFERING,
    GATHER_COMBINER,
    KERNEL_CACHE,
    MEMORY_SLOP,
    OVERLAP_LIMIT,
    RADIX_SORT,
    REDUCE_COMBINER,
    SHARD_AUTOTUNING,
    SLICE_FUSION,
    SLOP_PERCENT,
    TRITON_GEMM,
    known,
)

Options = dict[str, bool | int | str | bytes]


def compile_options(platform: str) -> Options:
    """Options for compiling for ``platform``.

    Without a GPU nothing can be autotuned, and every dot would become a Triton fusion with a degenerate tile; cuBLAS
    calls are what a tuned compilation chooses for the large ones. CUB, which sorts long arrays, is asked on a GPU how
    much memory it takes.
    """
    if platform == "cuda" and not _gpu_attached():
        return known({TRITON_GEMM: False, AUTOTUNE_LEVEL: 0, RADIX_SORT: False})
    return {}


def peak_bytes(memory: Any) -> int:
    """Device memory a program takes, by ``memory_analysis()``: arguments, results of their own, and temporaries."""
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def host_bytes(memory: Any) -> int:
    """Memory of its host that a program takes for each device, by ``memory_analysis()``."""
    results = memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    return memory.host_argument_size_in_bytes + results + memory.host_temp_size_in_bytes


def alone_options(platform: str) -> Options:
    """Options for a compilation that one process of several does by itself: it waits for no other's autotuning."""
    return known({SHARD_AUTOTUNING: False}) if platform == "cuda" and jax.process_count() > 1 else {}


def kernel_options(platform: str, kernels: Path | None) -> Options:
    """Options for compilations that are looked at and thrown away, one much like the other.

    Args:
      platform: ``cpu`` or ``cuda``.
      kernels: a file in a folder of the caller's, where XLA finds kernels that it compiled before, and leaves others:
        for GPUs of one kind and the same other options, which is not checked. None for all kernels to be compiled.
    """
    config: Any = jax.config
    if platform != "cuda" or kernels is None or _gpu_attached() or config.jax_compilation_cache_dir is not None:
        return {}
    return known({KERNEL_CACHE: str(kernels)})


def launched_singly(platform: str) -> Options:
    """Every kernel is launched by itself: of those in a CUDA graph a profile knows no more than which graph.

    2026-11, jax 0.11.2 on an H200: a profile has the graph for the op of every kernel. XLA would launch no graphs while
    it is profiled, but the profile is JAX's, of which XLA's plugin for CUDA does not know.
    """
    return known({CUDA_GRAPHS: ""}) if platform == "cuda" else {}


def double_buffering() -> Options:
    """Two iterations of a loop in one body: what a pipelined loop carries changes buffers without being copied."""
    return {DOUBLE_BUFFERING: True}


def kernels_once() -> Options:
    """What a loop stacks up is copied from what its kernel wrote.

    With jax 0.11 XLA writes it by a second run of the kernel, a matrix product as any other (openxla/xla 43831).
    """
    return {SLICE_FUSION: False} if _jax_compat.fuses_slices() else {}


def stacks_in_turn() -> Options:
    """Each loop's stacks take memory from where it begins.

    They begin as copies of zeros. XLA of jax up to 0.11 writes those of all loops by one kernel, where the step begins
    (openxla/xla 27322).
    """
    return {DISABLED_PASSES: COPY_FUSION} if _jax_compat.fuses_copies() else {}


def copies_at_once() -> Options:
    """As many copies between device and host may be under way as there are: they follow one another anyway.

    XLA's scheduler has two in flight, and waits for the first before it starts the third.
    """
    return {COPY_LIMIT: 16}


def two_collectives() -> Options:
    """A second collective may start while one is in flight."""
    return {OVERLAP_LIMIT: 2}


def memory_options(limit_bytes: int, argument_bytes: int, device_bytes: int) -> Options:
    """Keeps XLA's scheduler from running short of memory too early.

    Before it schedules, XLA estimates the peak, and where it believes to be over its limit it serialises collectives
    and computes things twice. Its estimates are above what buffers take in the end (77 GiB for 68, Llama-3-70B; while
    things are computed twice stacks that are updated in place count twice), so it is given many times as much;
    that the limit holds is checked on the compiled program.

    Args:
      limit_bytes: device memory the program may take.
      argument_bytes: of it, what the program is given.
      device_bytes: the device's memory; XLA plans with 80 % of it, less the arguments, times the factor set here.
    """
    own = device_bytes * _XLA_SHARE - argument_bytes
    if own <= 0:
        return {}
    percent = max(int(_ROOM * 100 * (limit_bytes - argument_bytes) / own), 100)
    return {MEMORY_SLOP: min(percent, SLOP_PERCENT.most)}


def most_argument_bytes(device_bytes: int) -> int:
    """What a program may be given for XLA's scheduler to believe that it has memory to overlap anything in."""
    return int(device_bytes * _XLA_SHARE) - _LEAST_OWN_BYTES


def strictly_limited(options: Mapping[str, bool | int | str]) -> dict[str, bool | int | str]:
    """``options`` without the room that ``memory_options`` gives XLA's estimate."""
    slop = options.get(MEMORY_SLOP)
    return dict(options) if slop is None else dict(options) | {MEMORY_SLOP: max(int(int(slop) / _ROOM), 100)}


_ROOM = 32.0
"""Times the limit. With 2.4 XLA computed again 1 to 2 % of steps with values on the host, and saved no byte by that;
with 8 it was 14 % of one whose loop updates state, which it counts anew for each iteration in a body."""


_LEAST_OWN_BYTES = 1 << 30
"""Of what XLA plans with, beside a program's arguments: with that it overlaps copies, with none it does not."""

_XLA_SHARE = 0.8
"""Of a device's memory: ``GetSchedulerMemoryLimit`` in xla/service/gpu/gpu_hlo_schedule.cc."""


def combiner_options(gather_bytes: int, reduce_bytes: int) -> Options:
    """Neighbouring collectives become one.

    Args:
      gather_bytes: up to so many bytes of gathered values.
      reduce_bytes: up to so many bytes of what a device keeps of the reduced values; XLA counts results.
    """
    return {GATHER_COMBINER: gather_bytes, REDUCE_COMBINER: reduce_bytes}


def _gpu_attached() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False
