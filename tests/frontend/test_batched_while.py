"""Batched loops with one condition: the same values, and other loops untouched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_deepcompile._jax_compat import eval_local, open_jaxpr
from jax_deepcompile.frontend.canonicalize.batched_while import with_one_condition
from jax_deepcompile.ir.traversal import equations

pytestmark = pytest.mark.pure

SCALES = jnp.array([[0.3, 1.7, 40.0], [5.0, 0.0, 900.0]])


def halved(x, floor):
    """As often as this element needs."""
    return lax.while_loop(lambda c: jnp.abs(c[1]) > floor, lambda c: (c[0] + 1, c[1] / 2), (0, x))


def conditions(closed) -> list[tuple[int, ...]]:
    loops = (eqn for eqn in equations(closed) if eqn.primitive.name == "while")
    return [open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0].aval.shape for eqn in loops]


def rows_in_a_scan(scales):
    return lax.scan(lambda total, row: (total + 1, jax.vmap(lambda x: halved(x, 0.5))(row)), 0, scales)


CASES = {
    "one axis": lambda scales: jax.vmap(lambda x: halved(x, 0.5))(scales[1]),
    "two axes": jax.vmap(jax.vmap(lambda x: halved(x, 0.5))),
    "in a scan": rows_in_a_scan,
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_values_with_one_condition(name: str):
    before = jax.make_jaxpr(CASES[name])(SCALES)
    after = with_one_condition(before)
    assert any(conditions(before))
    assert not any(conditions(after))
    for ours, plain in zip(eval_local(after, [SCALES]), jax.tree.leaves(CASES[name](SCALES)), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_conditions_that_read_constants():
    floors = jnp.array([0.5, 2.0, 7.0])
    fun = jax.vmap(jax.vmap(halved), in_axes=(0, None))
    after = with_one_condition(jax.make_jaxpr(fun)(SCALES, floors))
    assert not any(conditions(after))
    for ours, plain in zip(eval_local(after, [SCALES, floors]), fun(SCALES, floors), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_a_loop_with_one_condition_stays_as_it_is():
    before = jax.make_jaxpr(lambda x: lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, x))(SCALES)
    assert with_one_condition(before) is before
