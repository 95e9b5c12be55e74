"""What loops leave for others is left as what it was widened from, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import dce, open_jaxpr
from jax_deepcompile.frontend.canonicalize.narrow_residuals import with_narrow_residuals
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.traversal import equations, inline_calls
from tests.cases import examples

pytestmark = pytest.mark.pure

X = np.random.default_rng(0).standard_normal((4, 8), np.float32)
W = np.random.default_rng(1).standard_normal((3, 8, 8), np.float32)
HALF = jnp.bfloat16


def rewritten(function, *args) -> jex.ClosedJaxpr:
    """The rewritten jaxpr, without what is dead, which computes the same bits."""
    before = inline_calls(jax.make_jaxpr(function)(*args))
    after = with_narrow_residuals(before)
    live = jex.ClosedJaxpr(dce(open_jaxpr(after)), after.consts)
    jex.check_jaxpr(open_jaxpr(live))
    old, new = (jax.jit(jex.jaxpr_as_fun(closed))(*jax.tree.leaves(args)) for closed in (before, live))
    for left, right in zip(old, new, strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))
    return live


def left(closed: jex.ClosedJaxpr) -> list[list[str]]:
    """What each loop stacks, a layer of it."""
    loops = [Scan(eqn) for eqn in equations(open_jaxpr(closed)) if eqn.primitive.name == "scan"]
    return [sorted(atom.aval.str_short(short_dtypes=True) for atom in loop.outputs.ys) for loop in loops]


def of_layers(layer, *more):
    """Gradients of ``layer(x, w, *more)`` by the weights of three."""

    def loss(weights, x, *more):
        x, _ = lax.scan(lambda x, w: (layer(x, w, *more), None), x.astype(HALF), weights)
        return jnp.sum(x.astype(jnp.float32))

    return jax.grad(loss), (W, X, *more)


def normalized(x, w):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1)).astype(HALF) @ w.astype(HALF)


def rounded(x, w, scale):
    small = (x.astype(jnp.float32) / scale).astype(jnp.float8_e4m3fn)
    return x + jnp.tanh((small.astype(HALF) * scale.astype(HALF)) @ w.astype(HALF))


class TestWhatIsLeft:
    def test_golden(self):
        """The layer's input in place of what it is in 32 bits."""
        function, args = of_layers(normalized)
        others = ["bf16[4,8]", "bf16[8,8]", "f32[4,1]", "f32[4,1]"]
        assert left(inline_calls(jax.make_jaxpr(function)(*args)))[0] == [*others, "f32[4,8]"]
        assert left(rewritten(function, *args))[0] == ["bf16[4,8]", *others]

    def test_what_was_rounded_is_left_as_it_was_rounded(self):
        function, args = of_layers(rounded, jnp.float32(0.25))
        assert "f8_e4m3fn[4,8]" in left(rewritten(function, *args))[0]

    def test_a_constant_of_the_loop_is_read_where_it_is(self):
        def function(x, shift):
            _, wide = lax.scan(lambda c, x: (c, x.astype(jnp.float32) - shift), 0, x)
            return lax.scan(lambda c, y: (c + y.sum(), None), 0.0, wide)[0]

        assert left(rewritten(function, X.astype(HALF), jnp.ones(8))) == [[]]

    def test_what_the_loop_reads_of_a_stack_is_read_again(self):
        def function(x):
            _, wide = lax.scan(lambda c, x: (c + 1, x.astype(jnp.float32) * 2), 0, x)
            return lax.scan(lambda c, y: (c + y, None), jnp.zeros(8), wide, reverse=True)[0]

        assert left(rewritten(function, X.astype(HALF))) == [[]]

    def test_loops_in_loops(self):
        def function(x):
            def outer(c, x):
                _, wide = lax.scan(lambda c, v: (c, (v.astype(jnp.float32), c)[0]), 0, x)
                return c + lax.scan(lambda c, y: (c + y, None), 0.0, wide)[0], None

            return lax.scan(outer, 0.0, x)[0]

        assert all(not made for made in left(rewritten(function, X.astype(HALF))))


def read_whole(x):
    _, wide = lax.scan(lambda c, x: (c, x.astype(jnp.float32)), 0, x)
    return wide.sum() + lax.scan(lambda c, y: (c + y, None), jnp.zeros(8), wide)[0]


def returned(x):
    _, wide = lax.scan(lambda c, x: (c, x.astype(jnp.float32)), 0, x)
    return wide, lax.scan(lambda c, y: (c + y, None), jnp.zeros(8), wide)[0]


def of_much_work(x):
    _, wide = lax.scan(lambda c, x: (c, jnp.exp(x.astype(jnp.float32))), 0, x)
    return lax.scan(lambda c, y: (c + y, None), jnp.zeros(8), wide)[0]


def narrowed(x):
    _, small = lax.scan(lambda c, x: (c + x.astype(jnp.float32), (c * 2).astype(HALF)), jnp.zeros(8), x)
    return lax.scan(lambda c, y: (c + y, None), jnp.zeros(8, HALF), small)[0]


def of_as_much(x):
    _, product = lax.scan(lambda c, x: (x, x.astype(jnp.float32) * c.astype(jnp.float32)), x[0], x)
    return lax.scan(lambda c, y: (c + y, None), jnp.zeros(8), product)[0]


@pytest.mark.parametrize("function", [read_whole, returned, of_much_work, narrowed, of_as_much])
def test_what_stays_as_it_is(function):
    before = inline_calls(jax.make_jaxpr(function)(X.astype(HALF)))
    assert with_narrow_residuals(before) is before


LINKS = {
    "wide": lambda x, w, c: x.astype(jnp.float32),
    "half": lambda x, w, c: x.astype(HALF),
    "eighth": lambda x, w, c: x.astype(jnp.float8_e5m2).astype(jnp.float32),
    "scaled": lambda x, w, c: x * c.astype(x.dtype),
    "by rows": lambda x, w, c: x + w[0].astype(x.dtype),
    "normed": lambda x, w, c: x / (1 + jnp.max(jnp.abs(x), axis=-1, keepdims=True)),
    "squared": lambda x, w, c: x * x,
    "turned": lambda x, w, c: x.T.reshape(x.shape),
    "mixed": lambda x, w, c: x @ w.astype(x.dtype),
    "bent": lambda x, w, c: jnp.sin(x),
}


@examples(60)
@given(st.lists(st.sampled_from(sorted(LINKS)), min_size=1, max_size=7), st.booleans())
def test_whatever_layers_are_made_of(links, reverse):
    def loss(weights, x, c):
        def layer(x, w):
            made = x.astype(jnp.float32)
            for name in links:
                made = LINKS[name](made, w, c)
            return (x + made.astype(x.dtype) / 8).astype(HALF), made

        x, made = lax.scan(layer, x.astype(HALF), weights, reverse=reverse)
        return (
            jnp.sum(x.astype(jnp.float32)) + lax.scan(lambda c, y: (c + y[0, 0], 0), jnp.zeros((), made.dtype), made)[0]
        )

    rewritten(jax.value_and_grad(lambda *args: loss(*args).astype(jnp.float32)), W, X, jnp.float32(0.5))
