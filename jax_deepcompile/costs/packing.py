"""Addresses for buffers that are needed at different times, and so the size of the memory that holds them all.

XLA sorts the buffers, by size or by how long they are needed, and puts each into the tightest gap that stays free while
it is needed (``GlobalDecreasingSizeBestFitHeap``); of the two orders it takes the better. What that leaves unused is
fragmentation, which is part of what a program takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALIGNMENT_BYTES = 256
"""XLA's alignment of buffers on GPUs (``kXlaAllocatedBufferAlignBytes``)."""


@dataclass(frozen=True)
class Block:
    """Memory needed at some times, at one address.

    Attributes:
      size_bytes: how much.
      begins: when each stretch of need begins.
      ends: when it ends, itself included.
    """

    size_bytes: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def span(self) -> int:
        return max(self.ends) - self.begins[0]


def packed_bytes(blocks: Sequence[Block]) -> int:
    """Bytes of memory that hold all ``blocks``."""
    by_size = sorted(blocks, key=lambda block: (-block.size_bytes, -block.span))
    by_span = sorted(blocks, key=lambda block: (-block.span, -block.size_bytes))
    return min(_height(by_size), _height(by_span))


def _height(blocks: Sequence[Block]) -> int:
    """Bytes taken when blocks are placed one after another, each into the tightest gap."""
    stretches = sum(len(block.begins) for block in blocks)
    begins, ends = np.empty(stretches, np.int64), np.empty(stretches, np.int64)
    bottoms, tops = np.empty(stretches, np.int64), np.empty(stretches, np.int64)
    placed, height = 0, 0
    for block in blocks:
        size = -(-block.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        meets = np.zeros(placed, bool)
        for begin, end in zip(block.begins, block.ends, strict=True):
            meets |= (begins[:placed] <= end) & (ends[:placed] >= begin)
        bottom = _tightest(bottoms[:placed][meets], tops[:placed][meets], size)
        for begin, end in zip(block.begins, block.ends, strict=True):
            begins[placed], ends[placed], bottoms[placed], tops[placed] = begin, end, bottom, bottom + size
            placed += 1
        height = max(height, bottom + size)
    return height


def _tightest(bottoms: np.ndarray, tops: np.ndarray, size: int) -> int:
    """Where to put ``size`` bytes: the smallest gap between taken stretches that holds them, else above them all."""
    order = np.argsort(bottoms, kind="stable")
    bottoms, tops = bottoms[order], np.maximum.accumulate(tops[order])
    floors = np.concatenate(([0], tops))
    gaps = np.append(bottoms, np.iinfo(np.int64).max) - floors
    fits = np.flatnonzero(gaps >= size)
    return int(floors[fits[np.argmin(gaps[fits])]])
