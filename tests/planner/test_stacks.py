"""Which stacks are chosen for a collective of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

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


def test_of_what_is_small_only_as_much_leaves_the_loops_as_is_small_together():
    """Three stacks of 7.6 MiB, of layers that a gather begins as long as it sends."""

    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]) + w["d"], None

        return jnp.mean(lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    width = 352
    program, mesh = sharded(loss, dict.fromkeys("abc", (16, width, width)) | {"d": (16, width)}, batch=(64, width))
    ahead, back = small_stacks(program, Environment(mesh, "cuda", CostModel(), None))
    assert (ahead.gathers, back.gathers) == (("a", "b", "d"), ("a", "b"))  # nobody reads the bias for backward
    assert back.reductions == ("a", "b", "d")


def test_what_is_large_stays_in_the_loops():
    program, mesh = sharded(
        stack_loss, {"stack": {"up": (4, 16, 1 << 20), "down": (4, 1 << 20, 16), "bias": (4, 1 << 20)}}
    )
    small = small_stacks(program, Environment(mesh, "cuda", CostModel(), None))
    inside = StackCollectives.apply(program, mesh, small)
    assert count(inside, "all_gather") == 2 * (2 * 4 + 1)
