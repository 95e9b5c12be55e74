"""Which stacks are chosen for a collective of their own."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.stacks import (
    Stack,
    enough_bytes,
    most_bytes,
    repeated_stacks,
    small_stacks,
    with_gathers,
)
from jax_deepcompile.transforms.stack_collectives import StackCollectives, stack_collectives
from tests.transforms.programs import LAYERS, count, run_stack, sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.pure

STACK = {"stack": stack_shapes()}


def nested_loss(params, batch):
    def again(total, part):
        return total + jnp.mean(run_stack(params["stack"], part) ** 2), None

    return lax.scan(again, 0.0, jnp.stack([batch, 2 * batch]))[0]


def stack_of(size: int, name: str = "scan.0/scan.0") -> Stack:
    return Stack(((name, size),), size)


@given(st.lists(st.integers(1, 100), max_size=9), st.integers(0, 300))
def test_no_other_stacks_come_closer_to_the_memory(sizes, free_bytes):
    stacks = [Stack((("scan.0/scan.0", index),), size) for index, size in enumerate(sizes)]
    best = sum(stack.size_bytes for stack in most_bytes(stacks, free_bytes))
    reachable = {0}
    for size in sizes:
        reachable |= {size + other for other in reachable}
    assert best == max(total for total in reachable if total <= free_bytes)


@given(st.lists(st.integers(1, 100), min_size=15, max_size=40), st.integers(0, 1000))
def test_many_stacks_fit_too(sizes, free_bytes):
    stacks = [Stack((("scan.0/scan.0", index),), size) for index, size in enumerate(sizes)]
    chosen = most_bytes(stacks, free_bytes)
    assert sum(stack.size_bytes for stack in chosen) <= free_bytes
    assert not any(
        stack.size_bytes <= free_bytes - sum(s.size_bytes for s in chosen) for stack in set(stacks) - set(chosen)
    )


@given(st.lists(st.integers(1, 100), max_size=9), st.integers(0, 300))
def test_no_fewer_stacks_are_enough(sizes, wanted_bytes):
    stacks = [Stack((("scan.0/scan.0", index),), size) for index, size in enumerate(sizes)]
    chosen = sum(stack.size_bytes for stack in enough_bytes(stacks, wanted_bytes))
    reachable = {0}
    for size in sizes:
        reachable |= {size + other for other in reachable}
    assert chosen == min((total for total in reachable if total >= wanted_bytes), default=sum(sizes))


@given(st.lists(st.integers(1, 100), min_size=15, max_size=40), st.integers(0, 1000))
def test_many_stacks_are_enough_too(sizes, wanted_bytes):
    stacks = [Stack((("scan.0/scan.0", index),), size) for index, size in enumerate(sizes)]
    chosen = enough_bytes(stacks, wanted_bytes)
    assert sum(stack.size_bytes for stack in chosen) >= min(wanted_bytes, sum(sizes))


def test_nothing_fits_in_no_memory():
    assert most_bytes([stack_of(5)], -1) == []
    assert most_bytes([], 100) == []


def test_forward_and_backward_gather_the_same_stacks():
    program, _ = sharded(nested_loss, STACK)
    stacks = repeated_stacks(program, ())
    whole = sum(4 * layers * rows * columns for layers, rows, columns in [(LAYERS, 16, 32), (LAYERS, 32, 16)])
    assert sum(stack.size_bytes for stack in stacks) >= whole
    taken = with_gathers((), stacks)
    assert repeated_stacks(program, taken) == []
    assert not any(choice.reductions for choice in taken)


def test_a_loop_by_itself_repeats_nothing():
    program, _ = sharded(stack_loss, STACK)
    assert repeated_stacks(program, ()) == []


def test_choices_of_one_loop_are_joined():
    taken = (StackCollectives("scan.0/scan.0", (2,), (1,)),)
    assert with_gathers(taken, [stack_of(0), stack_of(3), stack_of(7, "scan.0/scan.1")]) == (
        StackCollectives("scan.0/scan.0", (0, 2, 3), (1,)),
        StackCollectives("scan.0/scan.1", (7,)),
    )


def test_what_is_small_leaves_the_loops():
    """All of these stacks are: a gather of a few KiB is nothing but latency."""
    program, mesh = sharded(stack_loss, STACK)
    small = small_stacks(program, Environment(mesh, "cuda", CostModel(), None))
    assert count(stack_collectives(program, mesh, small), "all_gather") == 2 * 3


def test_what_is_large_stays_in_the_loops():
    program, mesh = sharded(
        stack_loss, {"stack": {"up": (4, 16, 1 << 20), "down": (4, 1 << 20, 16), "bias": (4, 1 << 20)}}
    )
    small = small_stacks(program, Environment(mesh, "cuda", CostModel(), None))
    inside = stack_collectives(program, mesh, small)
    assert count(inside, "all_gather") == 2 * (2 * 4 + 1)
