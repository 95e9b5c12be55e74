"""Which stacks are chosen for a collective of their own."""

from __future__ import annotations

import pytest

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.stacks import Stack, repeated_stacks, small_stacks, with_gathers, without_gathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from tests.transforms.programs import LAYERS, STACK, count, halves_loss, sharded, stack_loss

pytestmark = pytest.mark.pure

AHEAD, BACK = "stack @forward", "stack @backward"


def stack_of(*gathers: tuple[str, str]) -> Stack:
    return Stack(gathers, 1)


def test_forward_and_backward_gather_the_same_stacks():
    program, _ = sharded(halves_loss, STACK)
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
    stacks = [stack_of((AHEAD, "bias"), (BACK, "bias")), stack_of((AHEAD, "up"))]
    taken = (StackCollectives(AHEAD, ("up",), ("down",)),)
    joined = (StackCollectives(BACK, ("bias",)), StackCollectives(AHEAD, ("up", "bias"), ("down",)))
    assert with_gathers(taken, stacks) == joined
    assert with_gathers(joined, stacks) == joined
    assert without_gathers(joined, stacks) == (StackCollectives(BACK), StackCollectives(AHEAD, (), ("down",)))


def test_what_is_small_leaves_the_loops():
    """All of these stacks are: a gather of a few KiB is nothing but latency."""
    program, mesh = sharded(stack_loss, STACK)
    small = small_stacks(program, Environment(mesh, "cuda", CostModel(), None))
    assert count(StackCollectives.apply(program, mesh, small), "all_gather") == 2 * 3


def test_what_is_large_stays_in_the_loops():
    program, mesh = sharded(
        stack_loss, {"stack": {"up": (4, 16, 1 << 20), "down": (4, 1 << 20, 16), "bias": (4, 1 << 20)}}
    )
    small = small_stacks(program, Environment(mesh, "cuda", CostModel(), None))
    inside = StackCollectives.apply(program, mesh, small)
    assert count(inside, "all_gather") == 2 * (2 * 4 + 1)
