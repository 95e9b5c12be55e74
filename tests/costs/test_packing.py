"""Addresses for blocks of memory, by hand."""

from __future__ import annotations

import pytest

from jax_deepcompile.costs.packing import Block, packed

pytestmark = pytest.mark.pure


def block(size_kib: int, *stretches: tuple[int, int]) -> Block:
    return Block(size_kib * 1024, stretches)


@pytest.mark.parametrize(
    ("blocks", "total_kib"),
    [
        ([], 0),
        ([block(4, (0, 1)), block(2, (2, 3))], 4),  # one after the other
        ([block(4, (0, 2)), block(2, (2, 3))], 6),  # both at 2
        ([block(4, (0, 1), (5, 6)), block(4, (2, 4))], 4),  # in the pause of the other
        ([block(4, (0, 1), (5, 6)), block(4, (2, 5))], 8),  # not quite
        ([block(8, (0, 1)), block(3, (2, 3)), block(5, (2, 3))], 8),  # two where there was one
    ],
)
def test_blocks(blocks: list[Block], total_kib: int):
    assert packed(blocks).bytes == total_kib * 1024


def test_gaps_count():
    """The last 2 KiB find only two gaps of 1 KiB, one on each side of what stays."""
    blocks = [block(4, (0, 1)), block(3, (0, 5)), block(2, (2, 5)), block(2, (2, 5)), block(1, (4, 5))]
    needed_kib = (
        max(sum(b.size_bytes for b in blocks if b.needs[0][0] <= at <= b.needs[0][1]) for at in range(6)) / 1024
    )
    assert packed(blocks).bytes >= needed_kib * 1024


def test_of_two_orders_the_better_one():
    """By size alone, 6 KiB would go below, and what lives throughout above the 8 KiB that follow."""
    blocks = [block(8, (2, 3)), block(6, (0, 1)), block(1, (0, 3))]
    assert packed(blocks).bytes == 9 * 1024


def test_addresses_are_aligned():
    assert packed([Block(1, ((0, 1),)), Block(257, ((0, 1),))]).bytes == 256 + 512
