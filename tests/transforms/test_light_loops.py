"""Loops that count beside heavy work count on their own, and no others are touched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

from jax_deepcompile import _jax_compat
from jax_deepcompile.analysis.microbatches import is_heavy
from jax_deepcompile.ir.traversal import inline_calls
from jax_deepcompile.transforms.microbatch import split_light_loops

pytestmark = pytest.mark.pure

X = np.random.default_rng(0).standard_normal((5, 4, 3), np.float32)
W = np.random.default_rng(1).standard_normal((3, 3), np.float32)
MASK = np.arange(20, dtype=np.float32).reshape(5, 4) % 3


def split(function) -> list[tuple[int, bool]]:
    """For every scan of the split program how many of its results are read, and whether it is heavy."""
    closed = inline_calls(jax.make_jaxpr(function)(X, W, MASK))
    found = split_light_loops(_jax_compat.open_jaxpr(closed))
    jex.check_jaxpr(found)
    after = jex.ClosedJaxpr(found, _jax_compat.closed_consts(closed))
    old, new = (jax.jit(jex.jaxpr_as_fun(each))(X, W, MASK) for each in (closed, after))
    for left, right in zip(old, new, strict=True):
        np.testing.assert_array_equal(left, right)
    scans = [eqn for eqn in found.eqns if eqn.primitive.name == "scan"]
    read = {id(atom) for eqn in found.eqns for atom in eqn.invars} | set(map(id, found.outvars))
    return [(sum(id(var) in read for var in eqn.outvars), is_heavy(eqn)) for eqn in scans]


def test_a_count_beside_a_sum():
    def step(x, w, mask):
        def chunk(carry, turn):
            total, count = carry
            return (total + ((turn[0] @ w) * turn[1][:, None]).sum(), count + turn[1].sum()), None

        return lax.scan(chunk, (0.0, 0.0), (x, mask))[0]

    assert split(step) == [(1, False), (1, True)]


def test_what_is_heavy_before_the_loop():
    def step(x, w, mask):
        def chunk(carry, turn):
            return (carry[0] + (turn[0] ** 2).sum(), carry[1] + turn[1].sum()), None

        return lax.scan(chunk, (0.0, 0.0), (x @ w, mask))[0]

    assert split(step) == [(1, False), (1, False)]


def test_a_count_that_becomes_heavy_in_the_second_iteration():
    def step(x, w, mask):
        def chunk(carry, turn):
            heavy, late, latest = carry
            return (heavy + (turn @ w).sum(), late + heavy, latest + late), None

        return lax.scan(chunk, (0.0, 0.0, 0.0), x)[0]

    assert split(step) == [(3, True)]


def test_heavy_work_may_read_what_is_counted():
    def step(x, w, mask):
        def chunk(carry, turn):
            index, total = carry
            return (index + 1, total + (turn @ w).sum() * index), None

        return lax.scan(chunk, (0, 0.0), x)[0]

    assert split(step) == [(1, False), (1, True)]


def test_a_count_that_nothing_reads_stays():
    def step(x, w, mask):
        def chunk(carry, turn):
            return (carry[0] + 1, carry[1] + (turn @ w).sum() * carry[0]), None

        return lax.scan(chunk, (0, 0.0), x)[0][1]

    assert split(step) == [(1, True)]


def test_stacked_results_stay_with_the_heavy_work():
    def step(x, w, mask):
        return lax.scan(lambda carry, turn: (carry + (turn[0] @ w).sum(), turn[1] * 2), 0.0, (x, mask))

    assert split(step) == [(2, True)]


def test_what_is_printed_is_printed_once():
    def step(x, w, mask):
        def chunk(carry, turn):
            jax.debug.print("{}", turn[1].sum())
            return (carry[0] + (turn[0] @ w).sum(), carry[1] + turn[1].sum()), None

        return lax.scan(chunk, (0.0, 0.0), (x, mask))[0]

    assert split(step) == [(2, True)]


def test_loops_of_one_kind_stay():
    assert split(lambda x, w, mask: lax.scan(lambda c, t: (c + t.sum(), c), 0.0, mask)) == [(2, False)]
    assert split(lambda x, w, mask: lax.scan(lambda c, t: (c + (t @ w).sum(), c), 0.0, x)) == [(2, True)]
    assert split(lambda x, w, mask: jnp.sum(x)) == []
