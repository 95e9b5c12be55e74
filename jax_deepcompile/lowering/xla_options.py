"""The XLA options that a plan may set, and what each takes.

Plans are read from files and from other processes, and among XLA's options are such as start programs and write files:
a plan sets those that planning chooses, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
SLICE_FUSION = "xla_gpu_enable_dynamic_slice_fusion"
MEMORY_SLOP = "xla_gpu_memory_limit_slop_factor"
GATHER_COMBINER = "xla_gpu_all_gather_combine_threshold_bytes"
REDUCE_COMBINER = "xla_gpu_reduce_scatter_combine_threshold_bytes"


@dataclass(frozen=True)
class Range:
    """Whole numbers from ``least`` to ``most``."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def holds(self, value: object) -> bool:
        return type(value) is int and self.least <= value <= self.most


@dataclass(frozen=True)
class Switch:
    """On or off."""

    def __str__(self) -> str:
        return "True or False"

    def holds(self, value: object) -> bool:
        return type(value) is bool


SLOP_PERCENT = Range(1, 10**6)
"""XLA multiplies a device's bytes by it, in 64 bits."""

_BYTES = Range(0, 2**63 - 1)

PLANNED: Mapping[str, Range | Switch] = MappingProxyType(
    {
        DOUBLE_BUFFERING: Switch(),
        OVERLAP_LIMIT: Range(1, 16),
        SLICE_FUSION: Switch(),
        MEMORY_SLOP: SLOP_PERCENT,
        GATHER_COMBINER: _BYTES,
        REDUCE_COMBINER: _BYTES,
    }
)


def objection_to(name: object, value: object) -> str:
    """Why a plan may not set the option ``name`` to ``value``; empty if it may."""
    takes = PLANNED.get(name) if isinstance(name, str) else None
    if takes is None:
        others = "options of your own belong in XLA_FLAGS or in lower().compile(compiler_options=...)"
        return f"it sets the XLA option {name!r:.100}, and plans set {', '.join(PLANNED)} only; {others}"
    return "" if takes.holds(value) else f"it sets {name} to {value!r:.60}, which takes {takes}"
