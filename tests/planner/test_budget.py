"""What memory is spent on: never more than there is, nothing better left out, and less where it falls short."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_deepcompile.planner.budget import enough_bytes, ladder, most_bytes, most_worth, total_bytes
from jax_deepcompile.planner.strategy import Proposal
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions
from tests.planner.situations import START

pytestmark = pytest.mark.pure


@dataclass(frozen=True)
class Item:
    number: int
    size_bytes: int
    worth: float = 1.0


def items(sizes: list[int]) -> list[Item]:
    return [Item(number, size) for number, size in enumerate(sizes)]


def sums(sizes: list[int]) -> set[int]:
    """What any of them take together."""
    reachable = {0}
    for size in sizes:
        reachable |= {size + other for other in reachable}
    return reachable


FEW, MANY = st.lists(st.integers(1, 100), max_size=9), st.lists(st.integers(1, 100), min_size=15, max_size=40)


@given(FEW, st.integers(0, 300))
def test_no_others_come_closer_to_the_memory(sizes, free):
    assert total_bytes(most_bytes(items(sizes), free)) == max(total for total in sums(sizes) if total <= free)


@given(MANY, st.integers(0, 1000))
def test_many_fit_too(sizes, free):
    chosen = most_bytes(items(sizes), free)
    left = free - total_bytes(chosen)
    assert left >= 0
    assert not any(item.size_bytes <= left for item in set(items(sizes)) - set(chosen))


@given(FEW, st.integers(0, 300))
def test_no_fewer_are_enough(sizes, wanted):
    least = min((total for total in sums(sizes) if total >= wanted), default=sum(sizes))
    assert total_bytes(enough_bytes(items(sizes), wanted)) == least


@given(MANY, st.integers(0, 1000))
def test_many_are_enough_too(sizes, wanted):
    assert total_bytes(enough_bytes(items(sizes), wanted)) >= min(wanted, sum(sizes))


def test_nothing_fits_in_no_memory():
    assert most_bytes(items([5]), -1) == []
    assert most_bytes([], 100) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.0, 10.0)), max_size=12), st.integers(0, 600))
def test_what_is_worth_most_fits_and_nothing_of_worth_was_left_for_it(drawn, free):
    every = [Item(number, *each) for number, each in enumerate(drawn)]
    chosen = most_worth(every, lambda item: item.worth, free)
    left = free - total_bytes(chosen)
    assert left >= 0
    assert len(set(chosen)) == len(chosen)
    assert all(item.worth > 0 for item in chosen)
    assert [item.worth for item in chosen] == sorted((item.worth for item in chosen), reverse=True)
    assert all(item.size_bytes > left for item in every if item.worth > 0 and item not in chosen)


def test_proposals_go_down_step_by_step_and_the_same_plan_is_no_step():
    modest, same, most = (
        Proposal(START.having(OrderedReductions, [OrderedReductions(size)]), f"step {step}")
        for step, size in enumerate((1, 1, 2))
    )
    (top,) = ladder([modest, same, most])
    assert top == Proposal(most.plan, "step 2", otherwise=modest)
    assert ladder([]) == ()
