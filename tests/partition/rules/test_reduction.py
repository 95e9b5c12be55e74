"""Rules of reductions and cumulative operations."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.partition.rules.base import Kind
from tests.cases import examples
from tests.partition.rules.harness import check, integers, rules_of, seeds, sizes
from tests.partition.rules.ways import splittable

pytestmark = pytest.mark.cpu_mesh

shapes = st.lists(sizes, min_size=1, max_size=3)

REDUCTIONS = {
    "reduce_sum": (lax.reduce_sum, (np.float32, np.int32, np.complex64)),
    "reduce_max": (lax.reduce_max, (np.float32, np.int32, np.uint8, np.float16)),
    "reduce_min": (lax.reduce_min, (np.float32, np.int32, np.uint8, np.float16)),
    "reduce_prod": (lax.reduce_prod, (np.int32,)),
    "reduce_or": (lax.reduce_or, (np.bool_, np.int32)),
    "reduce_and": (lax.reduce_and, (np.bool_, np.int32)),
    "reduce_xor": (lax.reduce_xor, (np.bool_, np.int32)),
}


@examples(36)
@given(st.sampled_from(sorted(REDUCTIONS)), shapes, seeds, st.data())
def test_reductions(name, shape, seed, data):
    function, dtypes = REDUCTIONS[name]
    axes = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    values = integers(shape, seed, data.draw(st.sampled_from(dtypes)))
    check(lambda x: function(x, axes), values, primitives=[name])


@examples(8)
@given(shapes, seeds, st.booleans(), st.data())
def test_positions_of_extrema(shape, seed, largest, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    function = lax.argmax if largest else lax.argmin
    check(lambda x: function(x, axis, np.int32), integers(shape, seed), primitives=["argmax" if largest else "argmin"])


CUMULATIVE = {"cumsum": lax.cumsum, "cummax": lax.cummax, "cummin": lax.cummin, "cumlogsumexp": lax.cumlogsumexp}


@examples(16)
@given(st.sampled_from(sorted(CUMULATIVE)), shapes, seeds, st.booleans(), st.data())
def test_cumulative(name, shape, seed, reverse, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    function = CUMULATIVE[name]
    check(
        lambda x: function(x, axis=axis, reverse=reverse),
        integers(shape, seed),
        primitives=[name],
        rtol=1e-5 if name == "cumlogsumexp" else 0,
    )


def test_kinds():
    x = np.zeros((8, 16), np.int32)

    def kind(function, x):
        ((_, rule),) = rules_of(lambda x: function(x, (1,)), x, primitive=function.__name__)
        return rule.factors[rule.operands[0][1][0]].kind

    assert kind(lax.reduce_sum, x) is Kind.SUM
    assert kind(lax.reduce_max, x) is Kind.MAX
    assert kind(lax.reduce_and, x > 0) is Kind.MIN
    assert kind(lax.reduce_and, x) is Kind.WHOLE
    assert kind(lax.reduce_prod, x) is Kind.WHOLE


def test_dimensions_accumulated_along_are_never_split():
    x = np.zeros((8, 16), np.float32)
    ((_, rule),) = rules_of(lambda x: lax.cumsum(x, axis=1), x, primitive="cumsum")
    assert splittable(rule) == ([{0}], [{0}])
    ((_, rule),) = rules_of(lambda x: lax.argmax(x, 0, np.int32), x, primitive="argmax")
    assert splittable(rule) == ([{1}], [{0}])
    ((_, rule),) = rules_of(lambda x: lax.reduce_sum(x, (1,)), x[:6, :12], primitive="reduce_sum")
    assert splittable(rule) == ([set()], [set()])


@pytest.mark.parametrize("extreme", [jnp.max, jnp.min])
def test_a_nan_anywhere_is_the_extremum(extreme):
    """As on one device; XLA's own all-reduce of maxima drops it."""
    x = jnp.arange(16.0).reshape(16, 1).at[3].set(jnp.nan) * jnp.array([1.0, 0.0])
    x = x.at[:, 1].set(jnp.arange(16.0))
    sharded = deepcompile.shard(lambda state, x: (state, extreme(x, axis=0)), {"fsdp": 8})
    _, found = sharded(jnp.zeros(8), x)
    np.testing.assert_array_equal(found, extreme(x, axis=0))
