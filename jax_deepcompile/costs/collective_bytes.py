"""What a collective puts on the wire, whatever carries it."""

from __future__ import annotations


def sent_bytes(kind: str, size_bytes: int, group_size: int) -> int:
    """Bytes that one device sends in a collective done as a ring; it receives as many.

    ``(n - 1) / n`` of the size, for each device has one part already, or it keeps one; twice that for an all-reduce,
    which is a reduce-scatter and an all-gather; all of it for a permutation or a broadcast, handed on whole.

    Args:
      kind: as in HLO, such as ``all-gather``.
      size_bytes: the whole result of an all-gather, else one device's operand.
      group_size: devices that take part together.

    >>> sent_bytes("all-gather", 800, 8), sent_bytes("all-reduce", 800, 8), sent_bytes("collective-permute", 800, 2)
    (700, 1400, 800)
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return size_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * size_bytes * (group_size - 1) // group_size
