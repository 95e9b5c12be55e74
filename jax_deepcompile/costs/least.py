"""What no schedule of a program's operations beats: each queue runs its own one after another, and some need others.

Before an operation there are those that it needs, after it those that need it. Each of the two takes at least as long
as its busiest queue, so the step takes both and the operation between them. The operation for which that is most
divides the program, and each of its halves may be divided again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jax_deepcompile.costs.streams import Queue
from jax_deepcompile.hlo.reader import Computation

_MOST = 4096
"""Operations that are looked at: the longest. Without the others the least is less, and still nothing beats it."""


def least_s(computation: Computation, busy_s: Mapping[str, Mapping[Queue, float]]) -> float:
    """Seconds that no order of the instructions of ``computation`` beats.

    Args:
      busy_s: for each instruction that takes time, by name, how long it holds each queue at least.
    """
    longest = sorted(busy_s, key=lambda name: max(busy_s[name].values()), reverse=True)[:_MOST]
    rows = {name: row for row, name in enumerate(longest)}
    seconds = np.array([[busy_s[name].get(queue, 0.0) for queue in Queue] for name in longest], np.float32)
    return _divided_s(_needs(computation, rows), seconds.reshape(len(rows), len(Queue)))


def _needs(computation: Computation, rows: Mapping[str, int]) -> np.ndarray:
    """For each of ``rows``, by a one in its place, those that it needs."""
    reached: dict[str, int] = {}
    needs = np.zeros((len(rows), len(rows)), np.float32)
    width = -(-len(rows) // 8)
    for instruction in computation.instructions:
        before = 0
        for operand in instruction.operands:
            before |= reached.get(operand, 0)
        row = rows.get(instruction.name)
        if row is not None:
            bits = np.frombuffer(before.to_bytes(width, "little"), np.uint8)
            needs[row] = np.unpackbits(bits, count=len(rows), bitorder="little")
            before |= 1 << row
        reached[instruction.name] = before
    return needs


def _divided_s(needs: np.ndarray, seconds: np.ndarray) -> float:
    """What operations take at least that hold the queues for ``seconds``, each a row, and need each other."""
    together_s = float(seconds.sum(axis=0).max()) if len(seconds) else 0.0
    if len(seconds) < 2:
        return together_s
    through_s = (needs @ seconds).max(axis=1) + seconds.max(axis=1) + (needs.T @ seconds).max(axis=1)
    middle = int(through_s.argmax())
    if through_s[middle] <= together_s:
        return together_s
    before, after = needs[middle] > 0, needs[:, middle] > 0
    apart = (_divided_s(needs[np.ix_(each, each)], seconds[each]) for each in (before, after))
    return max(together_s, sum(apart, float(seconds[middle].max())))
