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
    """Memory at one address, needed by one value after another.

    Attributes:
      size_bytes: how much.
      needs: for each value, the positions in the schedule where it comes to be and where it is used last; in order.
    """

    size_bytes: int
    needs: tuple[tuple[int, int], ...]

    def stretches(self) -> list[tuple[int, int]]:
        """When it is needed without pause, from when to when."""
        merged = [self.needs[0]]
        for begin, end in self.needs[1:]:
            if begin > merged[-1][1] + 1:
                merged.append((begin, end))
            else:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
        return merged


def packed_bytes(blocks: Sequence[Block]) -> int:
    """Bytes of memory that hold all ``blocks``."""
    clock = _Clock(blocks)
    by_size = sorted(blocks, key=lambda block: (-block.size_bytes, -max(clock.elapsed([need]) for need in block.needs)))
    by_time = sorted(blocks, key=lambda block: (-clock.elapsed(block.needs), -block.size_bytes))
    return min(_height(by_size), _height(by_time))


class _Clock:
    """XLA's measure of time: how many values come to be or go in between."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        needs = np.array([need for block in blocks for need in block.needs], np.int64).reshape(-1, 2)
        self._events = np.sort(np.concatenate([2 * needs[:, 0], 2 * needs[:, 1] + 1]))

    def elapsed(self, needs: Sequence[tuple[int, int]]) -> int:
        first, last = 2 * needs[0][0], 2 * max(end for _, end in needs) + 1
        return int(np.searchsorted(self._events, last) - np.searchsorted(self._events, first))


def _height(blocks: Sequence[Block]) -> int:
    """Bytes taken when blocks are placed one after another, each into the tightest gap."""
    stretches = [block.stretches() for block in blocks]
    total = sum(map(len, stretches))
    begins, ends, bottoms, tops = (np.empty(total, np.int64) for _ in range(4))
    placed, height = 0, 0
    for block, needed in zip(blocks, stretches, strict=True):
        size = -(-block.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        meets = np.zeros(placed, bool)
        for begin, end in needed:
            meets |= (begins[:placed] <= end) & (ends[:placed] >= begin)
        bottom = _tightest(bottoms[:placed][meets], tops[:placed][meets], size)
        for begin, end in needed:
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
