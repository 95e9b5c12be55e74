"""What a kernel leaves in memory beside products."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.kernels import between_products

pytestmark = pytest.mark.pure


def written(function) -> list[str]:
    """The primitives that make what ``function`` of a matrix leaves between its products."""
    jaxpr = open_jaxpr(jax.make_jaxpr(function)(jnp.ones((4, 4))))
    makers = {var: eqn.primitive.name for eqn in jaxpr.eqns for var in eqn.outvars}
    return sorted(makers[var] for var in between_products(jaxpr, makers))


def softmax(x):
    scores = jnp.exp(x @ x)
    return (scores / scores.sum(axis=1, keepdims=True)) @ x


def residual(x):
    more = x + x @ x
    return more + jnp.tanh(more) @ x


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (softmax, ["div", "dot_general", "dot_general"]),
        (residual, ["add", "dot_general", "dot_general", "tanh"]),
        (lambda x: jnp.sin(checkpoint_name((x @ x).reshape(16), "named")), ["dot_general", "name", "reshape"]),
        (lambda x: jnp.sin(x) + jnp.cos(x), []),
    ],
    ids=["what one kernel reads twice", "what is read again after a product", "other names of it", "no products"],
)
def test_what_products_make_and_read_is_written_and_what_is_read_beyond_one(function, found):
    assert written(function) == found
