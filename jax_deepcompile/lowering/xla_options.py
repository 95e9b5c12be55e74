"""The XLA options that this package sets: what each takes, which XLA knows it, and whether a plan may name it.

Plans are read from files and from other processes, and among XLA's options are such as start programs and write files:
a plan sets those that planning chooses, and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from jax_deepcompile import errors

DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
COPY_LIMIT = "xla_gpu_experimental_parallel_async_compute_limit"
SLICE_FUSION = "xla_gpu_enable_dynamic_slice_fusion"
MEMORY_SLOP = "xla_gpu_memory_limit_slop_factor"
GATHER_COMBINER = "xla_gpu_all_gather_combine_threshold_bytes"
REDUCE_COMBINER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
TRITON_GEMM = "xla_gpu_enable_triton_gemm"
AUTOTUNE_LEVEL = "xla_gpu_autotune_level"
SHARD_AUTOTUNING = "xla_gpu_shard_autotuning"
DISABLED_PASSES = "xla_disable_hlo_passes"
KERNEL_CACHE = "xla_gpu_kernel_cache_file"
CUDA_GRAPHS = "xla_gpu_enable_command_buffer"
RADIX_SORT = "xla_gpu_enable_cub_radix_sort"

COPY_FUSION = "copy_fusion"
"""A pass of XLA."""

T = TypeVar("T")

Version: TypeAlias = tuple[int, ...]
"""Of jaxlib, which XLA comes with: major and minor are enough."""


@dataclass(frozen=True)
class Range:
    """Whole numbers from ``least`` to ``most``."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def holds(self, value: object) -> bool:
        """Whether ``value`` is one of them."""
        return type(value) is int and self.least <= value <= self.most


@dataclass(frozen=True)
class OneOf:
    """Some texts."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return " or ".join(map(repr, self.values))

    def holds(self, value: object) -> bool:
        """Whether ``value`` is one of them."""
        return value in self.values


@dataclass(frozen=True)
class Option:
    """One option of XLA.

    Attributes:
      name: as XLA calls it.
      takes: its type and range.
      is_planned: whether a plan may set it.
      since: the first jaxlib whose XLA knows it; 0.10 is the oldest that this package works with.
      until: the last; None where the newest knows it.
    """

    name: str
    takes: Range | OneOf | type[bool] | type[str]
    is_planned: bool = True
    since: Version = (0, 10)
    until: Version | None = None

    def is_known_to(self, jaxlib: Version) -> bool:
        """Whether the XLA of ``jaxlib`` knows it."""
        return self.since <= jaxlib and (self.until is None or jaxlib[: len(self.until)] <= self.until)

    def objection_to(self, value: object) -> str:
        """What it takes, where that is not ``value``; else empty."""
        if isinstance(self.takes, Range | OneOf):
            return "" if self.takes.holds(value) else str(self.takes)
        return "" if type(value) is self.takes else {bool: "True or False", str: "text"}[self.takes]


SLOP_PERCENT = Range(1, 10**6)
"""XLA multiplies a device's bytes by it, in 64 bits."""

_BYTES = Range(0, 2**63 - 1)

# 2026-11: XLA of jaxlib 0.10.2 and 0.12.0 compiles with each.
_OPTIONS = (
    Option(DOUBLE_BUFFERING, bool),
    Option(OVERLAP_LIMIT, Range(1, 16)),
    Option(COPY_LIMIT, Range(1, 64)),
    Option(SLICE_FUSION, bool),
    Option(MEMORY_SLOP, SLOP_PERCENT),
    Option(GATHER_COMBINER, _BYTES),
    Option(REDUCE_COMBINER, _BYTES),
    Option(DISABLED_PASSES, OneOf((COPY_FUSION,))),
    Option(TRITON_GEMM, bool, is_planned=False),
    Option(AUTOTUNE_LEVEL, Range(0, 5), is_planned=False),
    Option(SHARD_AUTOTUNING, bool, is_planned=False),
    Option(KERNEL_CACHE, str, is_planned=False),
    Option(CUDA_GRAPHS, str, is_planned=False),
    Option(RADIX_SORT, bool, is_planned=False),
)

OPTIONS: Mapping[str, Option] = MappingProxyType({option.name: option for option in _OPTIONS})
"""By name."""


def installed() -> Version:
    """The version of jaxlib."""
    return tuple(int(part) for part in version("jaxlib").split(".")[:2])


def known(options: Mapping[str, T]) -> dict[str, T]:
    """``options`` but for those that the installed XLA does not know: with them it would compile nothing.

    Each that is left out is named in a warning.
    """
    jaxlib = installed()
    unknown = [name for name in options if name in OPTIONS and not OPTIONS[name].is_known_to(jaxlib)]
    for name in unknown:
        warnings.warn(errors.UnknownXlaOptionWarning(name, jaxlib), stacklevel=2)
    return {name: value for name, value in options.items() if name not in unknown}


def objection_to(name: object, value: object) -> str:
    """Why a plan may not set the option ``name`` to ``value``; empty if it may."""
    option = OPTIONS.get(name) if isinstance(name, str) else None
    if option is None or not option.is_planned:
        planned = ", ".join(option.name for option in _OPTIONS if option.is_planned)
        others = "options of your own belong in XLA_FLAGS or in lower().compile(compiler_options=...)"
        return f"it sets the XLA option {name!r:.100}, and plans set {planned} only; {others}"
    takes = option.objection_to(value)
    return takes and f"it sets {name} to {value!r:.60}, which takes {takes}"
