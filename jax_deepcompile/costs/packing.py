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


@dataclass(frozen=True)
class Packing:
    """Where blocks are.

    Attributes:
      bytes: of memory that hold all of them.
      addresses: of each of them, from the beginning of that memory.
    """

    bytes: int
    addresses: tuple[int, ...]


def packed(blocks: Sequence[Block]) -> Packing:
    """Memory for all ``blocks``."""
    clock = _Clock(blocks)
    longest = [max(clock.elapsed([need]) for need in block.needs) for block in blocks]
    elapsed, sizes = [clock.elapsed(block.needs) for block in blocks], [block.size_bytes for block in blocks]
    by_size = sorted(range(len(blocks)), key=lambda at: (-sizes[at], -longest[at]))
    by_time = sorted(range(len(blocks)), key=lambda at: (-elapsed[at], -sizes[at]))
    return min(_placed(blocks, by_size), _placed(blocks, by_time), key=lambda packing: packing.bytes)


class _Clock:
    """XLA's measure of time: how many values come to be or go in between."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        needs = np.array([need for block in blocks for need in block.needs], np.int64).reshape(-1, 2)
        self._events = np.sort(np.concatenate([2 * needs[:, 0], 2 * needs[:, 1] + 1]))

    def elapsed(self, needs: Sequence[tuple[int, int]]) -> int:
        first, last = 2 * needs[0][0], 2 * max(end for _, end in needs) + 1
        return int(np.searchsorted(self._events, last) - np.searchsorted(self._events, first))


def _placed(blocks: Sequence[Block], order: Sequence[int]) -> Packing:
    """``blocks`` placed one after another in ``order``, each into the tightest gap."""
    stretches = [block.stretches() for block in blocks]
    total = sum(map(len, stretches))
    begins, ends, bottoms, tops = (np.empty(total, np.int64) for _ in range(4))
    placed, height, addresses = 0, 0, [0] * len(blocks)
    for at in order:
        needed = stretches[at]
        size = -(-blocks[at].size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        meets = np.zeros(placed, bool)
        for begin, end in needed:
            meets |= (begins[:placed] <= end) & (ends[:placed] >= begin)
        addresses[at] = bottom = _tightest(bottoms[:placed][meets], tops[:placed][meets], size)
        for begin, end in needed:
            begins[placed], ends[placed], bottoms[placed], tops[placed] = begin, end, bottom, bottom + size
            placed += 1
        height = max(height, bottom + size)
    return Packing(height, tuple(addresses))


def _tightest(bottoms: np.ndarray, tops: np.ndarray, size: int) -> int:
    """Where to put ``size`` bytes: the smallest gap between taken stretches that holds them, else above them all."""
    order = np.argsort(bottoms, kind="stable")
    bottoms, tops = bottoms[order], np.maximum.accumulate(tops[order])
    floors = np.concatenate(([0], tops))
    gaps = np.append(bottoms, np.iinfo(np.int64).max) - floors
    fits = np.flatnonzero(gaps >= size)
    return int(floors[fits[np.argmin(gaps[fits])]])
