"""What is made of arrays without elements is not computed, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

from jax_deepcompile import _jax_compat
from jax_deepcompile.frontend.canonicalize.empty_arrays import without_empty_arrays
from jax_deepcompile.ir.traversal import equations, inline_calls

pytestmark = pytest.mark.pure

X = np.random.default_rng(0).standard_normal((4, 3), np.float32)


def flat(function, *args) -> jex.ClosedJaxpr:
    return inline_calls(jax.make_jaxpr(function)(*args))


def names(closed) -> list[str]:
    """Of all live equations."""
    live = _jax_compat.dce(_jax_compat.open_jaxpr(closed))
    return [eqn.primitive.name for eqn in equations(live)]


def assert_same(function, *args) -> jex.ClosedJaxpr:
    """Results that differ in the sign of a zero at most; the rewritten jaxpr."""
    before = flat(function, *args)
    after = without_empty_arrays(before)
    jex.check_jaxpr(_jax_compat.open_jaxpr(after))
    assert after.out_avals == before.out_avals
    old, new = (jax.jit(jex.jaxpr_as_fun(closed))(*jax.tree.leaves(args)) for closed in (before, after))
    for left, right in zip(old, new, strict=True):
        np.testing.assert_array_equal(left, right)
    return after


def test_what_is_joined_with_nothing_stays_as_it_is():
    def padded(x):
        return jnp.concatenate([x[:0], x]) * 2

    after = assert_same(jax.grad(lambda x: (padded(x) ** 2).sum()), X)
    assert names(flat(padded, X)) == ["slice", "concatenate", "mul"]
    assert names(without_empty_arrays(flat(padded, X))) == ["mul"]
    assert not {"concatenate", "split", "slice", "pad"} & set(names(after))


@pytest.mark.parametrize("mode", ["edge", "mean", "linear_ramp", "maximum", "wrap", "reflect", "symmetric", "constant"])
@pytest.mark.parametrize("widths", [((0, 0), (1, 2)), ((0, 1), (0, 0)), ((0, 0), (0, 0))])
def test_padding_and_its_gradient(mode: str, widths):
    def padded(x):
        return jnp.pad(x, widths, mode=mode)

    assert_same(padded, X)
    after = assert_same(jax.grad(lambda x: (padded(x) ** 3).sum()), X)
    live = _jax_compat.dce(_jax_compat.open_jaxpr(after))
    assert all(var.aval.size for eqn in equations(live) for var in eqn.outvars)


def test_pieces_with_elements_stay_joined():
    after = assert_same(lambda x: jnp.concatenate([x, x[:0], 2 * x]), X)
    assert names(after) == ["mul", "concatenate"]


def test_all_pieces_empty():
    assert_same(lambda x: jnp.concatenate([x[:0], x[4:]]), X)


def test_several_pieces_of_a_split():
    assert_same(lambda x: jnp.split(x, [0, 2, 2]), X)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.float16])
def test_other_types(dtype):
    assert_same(lambda x: jnp.concatenate([x[:0], x, x[:0]]), X.astype(dtype))


def test_sums_over_nothing_are_zero_and_are_not_added():
    after = assert_same(lambda x: x + x[:0].sum(0), X)
    assert names(after) == []
    assert_same(lambda x: x[:0].sum(0), X)
    assert_same(lambda x: x[:0].sum() + 1.0, X)
    assert_same(lambda x: jnp.pad(x[:0], ((1, 3), (0, 0))) + x, X)


def test_what_is_not_zero_is_added():
    assert_same(lambda x: x + jnp.pad(x[:0], ((1, 3), (0, 0)), constant_values=2.0), X)
    assert_same(lambda x: x + x[:0].prod(0), X)
    assert_same(lambda x: x + jnp.max(x[:0], 0, initial=-5.0), X)
    assert_same(lambda x: x + jnp.cos(x[:0].sum(0)), X)
    assert_same(lambda x: 1 / (-jnp.sum(x[:0])), X)
    assert_same(lambda x: 1 / jnp.pad(x[:0], ((1, 3), (0, 0)), constant_values=-0.0), X)


def test_inside_loops_and_branches():
    def padded(x):
        return jnp.pad(x, ((0, 0), (1, 0)), mode="edge")[:, 1:]

    after = assert_same(lambda x: lax.scan(lambda carry, _: (padded(carry) * 0.5, carry.sum()), x, None, length=3), X)
    assert "concatenate" in names(after)
    assert all(
        var.aval.size for eqn in equations(_jax_compat.dce(_jax_compat.open_jaxpr(after))) for var in eqn.outvars
    )
    assert_same(lambda x: lax.cond(x.sum() > 0, padded, lambda x: x, x), X)


def test_arguments_and_results_without_elements():
    assert_same(lambda x, none: (x * 2, none), X, X[:0])
    assert_same(lambda x, none: (jnp.concatenate([none, x]), none + 1), X, X[:0])


def test_without_empty_arrays_nothing_changes():
    for function in (lambda x: jnp.concatenate([x, x]), lambda x: jnp.pad(x, 1) + 0.0, lambda x: jnp.split(x, 2)):
        before = flat(function, X)
        assert without_empty_arrays(before) is before
