"""What loops read of broadcasts is made in them, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import dce, open_jaxpr
from jax_deepcompile.analysis.recomputed import Place
from jax_deepcompile.frontend.canonicalize.broadcasts_in_loops import with_broadcasts_inside
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.traversal import equations, inline_calls

pytestmark = pytest.mark.pure

X = np.random.default_rng(0).standard_normal((5, 3, 4), np.float32)


def flat(function, *args) -> jex.ClosedJaxpr:
    return inline_calls(jax.make_jaxpr(function)(*args))


def assert_same(function, *args) -> jex.ClosedJaxpr:
    """The rewritten jaxpr, which computes the same bits."""
    before = flat(function, *args)
    after = with_broadcasts_inside(before)
    jex.check_jaxpr(open_jaxpr(after))
    old, new = (jax.jit(jex.jaxpr_as_fun(closed))(*jax.tree.leaves(args)) for closed in (before, after))
    for left, right in zip(old, new, strict=True):
        np.testing.assert_array_equal(left, right)
    return after


def constants(closed) -> list[list[tuple[int, ...]]]:
    """The shapes of those that each loop reads, outermost first."""
    loops = (Scan(eqn) for eqn in equations(open_jaxpr(closed)) if eqn.primitive.name == "scan")
    return [[atom.aval.shape for atom in loop.operands.consts] for loop in loops]


def outside(closed) -> list[str]:
    """The primitives of what is alive outside of loops."""
    return [eqn.primitive.name for eqn in dce(open_jaxpr(closed)).eqns]


def masked(stack, row):
    """A loop over the rows of ``stack`` that reads a mask and what is in the place of what it hides."""
    mask, fill = lax.broadcast_in_dim(row, (3, 4), (1,)), lax.broadcast_in_dim(jnp.float32(-7), (3, 4), ())
    return lax.scan(lambda carry, x: (carry + jnp.where(mask, x, fill), carry), fill, stack)


def test_a_mask_and_a_fill_are_made_in_the_loop():
    row = jnp.arange(4) % 2 == 0
    assert constants(flat(masked, X, row)) == [[(3, 4), (3, 4)]]
    after = assert_same(masked, X, row)
    assert sorted(constants(after)[0]) == [(), (4,)]
    assert outside(after) == ["broadcast_in_dim", "scan"], "the carry begins as one"


def test_of_what_is_broadcast_twice_the_first_is_read():
    def twice(stack, row):
        once = lax.broadcast_in_dim(row, (3, 4), (1,))
        more = lax.broadcast_in_dim(once, (1, 3, 4), (1, 2))
        return lax.scan(lambda carry, x: (carry + x * more, None), jnp.zeros((1, 3, 4)), stack)

    after = assert_same(twice, X, X[0, 0])
    assert constants(after) == [[(4,)]]


def test_in_loops_of_loops_the_innermost_makes_it():
    def nested(stack, row):
        spread = lax.broadcast_in_dim(row, (3, 4), (1,))

        def outer(carry, x):
            return lax.scan(lambda carry, _: (carry * 0.5 + x * spread, None), carry, None, length=2)[0], None

        return lax.scan(outer, jnp.zeros((3, 4)), stack)

    after = assert_same(nested, X, X[0, 0])
    assert [sorted(shapes) for shapes in constants(after)] == [[(4,)], [(3, 4), (4,)]]


def test_in_branches_and_loops_without_an_end_too():
    def hidden(stack, row):
        return lax.cond(stack.sum() > 0, masked, lambda stack, row: masked(-stack, ~row), stack, row)

    after = assert_same(hidden, X, jnp.arange(4) % 2 == 0)
    assert all(sorted(shapes) == [(), (4,)] for shapes in constants(after))


@pytest.mark.parametrize(
    "function",
    [
        lambda stack: lax.scan(lambda carry, x: (carry + x * stack[0], None), stack[1], stack),  # nothing is broadcast
        lambda stack: lax.scan(  # nor is this larger than what it is made of
            lambda carry, x: (carry + (x[None] * stack[0][None])[0], None), stack[1], stack
        ),
        lambda stack: lax.scan(lambda carry, x: (carry + x, None), jnp.zeros((3, 4)), stack),  # a carry
        lambda stack: lax.scan(lambda carry, x: (carry * x, x), jnp.float32(1), jnp.ones(5)),  # a stack
    ],
)
def test_other_loops_stay_as_they_are(function):
    before = flat(function, X)
    assert with_broadcasts_inside(before) is before


def test_what_others_read_is_still_made_outside():
    def read(stack, row):
        spread = lax.broadcast_in_dim(row, (3, 4), (1,))
        return lax.scan(lambda carry, x: (carry + x * spread, None), jnp.zeros((3, 4)), stack), spread

    after = assert_same(read, X, X[0, 0])
    assert outside(after).count("broadcast_in_dim") == 2
    assert constants(after) == [[(4,)]]


def test_what_is_made_of_broadcasts_is_made_inside_too():
    """One of them is a broadcast by its sizes of 1 alone."""

    def both(stack, small):
        mask = lax.and_p.bind(lax.broadcast_in_dim(True, (2, 3, 4), ()), small)
        body = lambda carry, x: (carry + jnp.where(mask, x, 0.0), None)  # noqa: E731
        return lax.scan(body, jnp.zeros((2, 3, 4)), stack), lax.scan(body, jnp.ones((2, 3, 4)), -stack)

    stack, small = np.stack([X, 2 * X], 1), jnp.arange(12).reshape(1, 3, 4) % 5 > 1
    assert constants(flat(both, stack, small)) == [[(2, 3, 4)]] * 2
    after = assert_same(both, stack, small)
    assert constants(after) == [[(1, 3, 4)]] * 2
    assert outside(after).count("and") == 0


KINDS = {
    "fill": lambda x: lax.broadcast_in_dim(jnp.float32(2), (3, 4), ()),
    "row": lambda x: lax.broadcast_in_dim(x[0], (3, 4), (1,)),
    "column": lambda x: lax.broadcast_in_dim(x[:, 0], (3, 4), (0,)),
    "one row": lambda x: x[:1],
    "whole": lambda x: x,
}
"""Operands of operations whose results are 3 by 4."""

SMALL = {
    ("fill", "row"): (4,), ("column", "fill"): (3,), ("fill", "one row"): (1, 4), ("fill", "fill"): (),
    ("row", "fill"): (4,), ("one row", "fill"): (1, 4), ("fill", "column"): (3,), ("one row", "one row"): (1, 4),
}  # fmt: skip
"""By the kinds of two operands, the shape of the one thing that their sum is a broadcast of; others stay outside."""


@pytest.mark.parametrize("right", KINDS)
@pytest.mark.parametrize("left", KINDS)
def test_sums_of_two(left: str, right: str):
    def summed(stack):
        both = lax.add_p.bind(KINDS[left](stack[0]), KINDS[right](stack[1]))
        return lax.scan(lambda carry, x: (carry * both + x, None), stack[2], stack)

    after = assert_same(summed, X)
    assert constants(after) == [[SMALL.get((left, right), (3, 4))]]


def test_checkpointed_layers_are_still_seen_to_compute_again_what_they_did():
    """JAX moves the fill out of the first loop only, in which it is then made as the second one makes it."""

    def layer(x, weights):
        fill = lax.broadcast_in_dim(jnp.int32(7), x.shape, ()).astype(jnp.float32)
        return jnp.tanh(jnp.where(x > 0, x @ weights, fill) @ weights), None

    def loss(weights, x):
        return jnp.sum(lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    before = flat(jax.grad(loss), np.ones((5, 4, 4), np.float32), X[0])
    assert shared(with_broadcasts_inside(before)) == shared(before)
    assert shared(before).count("dot_general") == 2


def shared(closed) -> list[str]:
    """The primitives of what both loops compute, without what is made of parameters alone."""
    forward, backward = (eqn for eqn in equations(open_jaxpr(closed)) if eqn.primitive.name == "scan")
    layers = Place(closed).shared(forward, backward)
    makers = {var: eqn.primitive.name for eqn in layers.forward.eqns for var in eqn.outvars}
    return sorted(makers[each.first] for each in layers.activations)
