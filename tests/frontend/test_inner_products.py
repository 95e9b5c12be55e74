"""Inner products over the dimensions that arrays have: the same sum, and what is no such product untouched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.frontend.canonicalize.inner_products import without_ravel
from jax_deepcompile.ir.traversal import equations
from tests.partition.steps import shapes

pytestmark = pytest.mark.pure


def flat(fun, *args):
    """``vdot`` is inlined; nothing else is called."""
    return jax.make_jaxpr(fun)(*args)


def products(closed) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(v.aval.shape for v in eqn.invars) for eqn in equations(closed) if eqn.primitive.name == "dot_general"]


def inner(x, y):
    return jax.lax.dot_general(x.reshape(-1), y.reshape(-1), (((0,), (0,)), ((), ())))


@given(hnp.array_shapes(min_dims=1, max_dims=4, max_side=5), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_the_same_sum_over_the_arrays_own_dimensions(shape, seed):
    x, y = np.random.default_rng(seed).standard_normal((2, *shape)).astype(np.float32)
    after = without_ravel(flat(inner, x, y))
    assert products(after) == [(shape, shape)]
    np.testing.assert_allclose(eval_local(after, [x, y])[0], np.vdot(x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: inner(x, y.T),
        lambda x, y: jax.lax.dot_general(x.reshape(-1), y.T.reshape(-1), (((0,), (0,)), ((), ()))),
        lambda x, y: x.reshape(-1, 4) @ y.reshape(4, -1),
        lambda x, y: jnp.sum(x * y),
        lambda x, y: jax.lax.dot_general(x[0], y[0], (((0,), (0,)), ((), ()))),
    ],
    ids=["another order", "one transposed", "a matrix product", "a plain sum", "rows already"],
)
def test_other_sums_stay_as_they_are(fun):
    before = flat(fun, jnp.ones((4, 8)), jnp.ones((4, 8)))
    assert without_ravel(before) is before


def test_gradients_whose_norm_is_logged_stay_split():
    """Split inside of a layer stack, they would have to be whole to be put in a row."""

    def step(state, x):
        def loss(stack):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0] ** 2)

        grads = jax.grad(loss)(state)
        return state - 0.1 * grads, jnp.sqrt(jnp.vdot(grads, grads))

    program = deepcompile.shard(step, {"fsdp": 8}).trace(shapes((4, 16, 16)), shapes((16, 16))).sharded
    gathered = [eqn.outvars[0].aval.shape for eqn in equations(program.jaxpr) if eqn.primitive.name == "all_gather"]
    assert set(gathered) == {(16, 16)}
