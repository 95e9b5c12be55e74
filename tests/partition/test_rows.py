"""Functions of stacks are computed for another number of rows, if every row is computed by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.traversal import inline_calls
from jax_deepcompile.partition.rows import rows_of, with_rows
from tests.api.steps import assert_equal
from tests.cases import examples

pytestmark = pytest.mark.pure

PIECES = {
    "gram": lambda x: x @ x.T @ x,
    "tall": lambda x: (x.T @ x).T @ x.T @ x @ x.T,
    "norm": lambda x: x / (1 + jnp.linalg.norm(x)),
    "row sums": lambda x: x - x.sum(axis=1, keepdims=True) * x.mean(),
    "largest": lambda x: jnp.where(x > x.max() / 2, x, jnp.clip(x, -1, 1)),
    "reshaped": lambda x: x.reshape(-1)[::-1].reshape(x.shape),
    "padded": lambda x: jnp.pad(x, 1)[1:-1, :-2] + jnp.concatenate([x[1:], x[:1]]),
    "counted": lambda x: x + jnp.arange(x.shape[0])[:, None] + jnp.eye(*x.shape),
    "running": lambda x: jnp.cumsum(x, axis=1).astype(jnp.bfloat16).astype(jnp.float32),
    "loop": lambda x: lax.fori_loop(0, 3, lambda at, x: x + at * 0.1 * jnp.sin(x), x),
    "over coefficients": lambda x: lax.scan(lambda x, c: (c * x, x.sum()), x, jnp.arange(1.0, 4))[0],
    "over its columns": lambda x: lax.scan(lambda _, c: (None, c * c.sum()), None, x.T)[1].T,
}


def traced(function, *args):
    return open_jaxpr(inline_calls(jax.make_jaxpr(function)(*args)))


@examples(60)
@given(
    st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4), st.integers(2, 5), st.integers(1, 7), st.data()
)
def test_as_many_as_wanted(names, rows, height, data):
    m, n = data.draw(st.sampled_from([(3, 3), (3, 4), (4, 2)]))

    def function(x):
        for name in names:
            x = PIECES[name](x)
        return x

    jaxpr = traced(jax.vmap(function), jnp.zeros((rows, m, n)))
    found = rows_of(jaxpr.eqns, {jaxpr.invars[0]: 0})
    assert found is not None
    assert found[jaxpr.outvars[0]] == 0
    x = jax.random.normal(jax.random.key(height), (height, m, n))
    made = with_rows(jaxpr.eqns, {jaxpr.invars[0]: x}, found, height)
    assert_equal(made[jaxpr.outvars[0]], jax.vmap(function)(x))


@pytest.mark.parametrize(
    "function",
    {
        "sum": lambda x: x - x.sum(axis=0),
        "running": lambda x: jnp.cumsum(x, axis=0),
        "product": lambda x: jnp.einsum("lmn,kmn->lk", x, x),
        "contracted": lambda x: jnp.einsum("lmn,lmk->nk", x, x),
        "flat": lambda x: x.reshape(-1, x.shape[-1]) * 2,
        "reversed": lambda x: x[::-1],
        "counted": lambda x: x * jnp.arange(float(x.shape[0]))[:, None, None],
        "over the rows": lambda x: lax.scan(lambda s, row: (s, row), 0.0, x)[1],
        "branch": lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
        "while": lambda x: lax.while_loop(lambda x: x.sum() < 3, lambda x: x * 2, x),
        "grows in a loop": lambda x: lax.fori_loop(0, 2, lambda _, y: y + x.sum(0), jnp.zeros(x.shape[1:])),
    }.values(),
)
def test_not_where_rows_depend_on_one_another(function):
    jaxpr = traced(function, jnp.zeros((4, 3, 3)))
    assert rows_of(jaxpr.eqns, {jaxpr.invars[0]: 0}) is None
