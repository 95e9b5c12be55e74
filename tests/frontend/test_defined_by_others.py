"""Primitives without a rule that others define are written as those; what else has none stays as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.frontend.canonicalize.defined_by_others import with_others_written_out
from jax_deepcompile.ir.traversal import equations

RULES = {"scan", "while", "cond", "mul", "add", "sin", "reduce_sum", "sub", "convert_element_type"}


def primitive(name: str, impl, lowered=None, result=lambda x: x) -> Primitive:
    made = Primitive(name)
    made.def_impl(impl)
    made.def_abstract_eval(result)
    mlir.register_lowering(made, mlir.lower_fun(lowered or impl, multiple_results=False))
    return made


INNER = primitive("test_inner", lambda x: x * jnp.sin(x))
OUTER = primitive("test_outer", lambda x: INNER.bind(x) + np.float32(1))
ITSELF = primitive("test_itself", lambda x: ITSELF.bind(x), jnp.sin)
NUMPY = primitive("test_numpy", lambda x: np.sin(x), jnp.sin)
OTHER_TYPE = primitive("test_other_type", lambda x: x.sum(), jnp.sin)


def opened(fun, *args, rules=RULES):
    before = jax.make_jaxpr(fun)(*args)
    return before, with_others_written_out(before, rules.__contains__)


@pytest.mark.pure
@given(hnp.array_shapes(max_dims=3, max_side=4), st.booleans())
@settings(max_examples=20, deadline=None)
def test_what_defines_a_primitive_takes_its_place_in_loops_too(shape, is_loop):
    def looped(x):
        return jax.lax.scan(lambda carry, _: (OUTER.bind(carry), None), x, None, 2)[0] if is_loop else OUTER.bind(x)

    x = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    _, after = opened(looped, x)
    assert {eqn.primitive.name for eqn in equations(after)} <= RULES
    once = x * np.sin(x) + 1
    np.testing.assert_allclose(eval_local(after, [x])[0], once * np.sin(once) + 1 if is_loop else once, rtol=1e-5)


@pytest.mark.pure
@pytest.mark.parametrize("each", [ITSELF, NUMPY, OTHER_TYPE], ids=str)
def test_what_nothing_else_defines_stays(each):
    before, after = opened(each.bind, jnp.ones((4, 2)))
    assert after is before


@pytest.mark.pure
def test_what_has_a_rule_stays():
    before, after = opened(OUTER.bind, jnp.ones((4, 2)), rules=RULES | {"test_outer"})
    assert after is before


@pytest.mark.cpu_mesh
def test_one_that_knows_the_shape_of_its_operand_is_divided():
    def of_this_shape(x):
        assert x.shape == (16, 8), "the whole operand's"
        return jnp.tanh(x)

    whole = primitive("test_whole", of_this_shape)

    def step(w, x):
        return w - 0.1 * jnp.mean(whole.bind(x @ w)), jnp.sum(whole.bind(x @ w) ** 2)

    w, x = np.full((4, 8), 0.1, np.float32), np.linspace(0, 1, 64, dtype=np.float32).reshape(16, 4)
    sharded = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0)
    for found, expected in zip(sharded(w, x), jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert "no rule" not in str(sharded.explain())


@pytest.mark.pure
def test_what_jax_defines_so_is_divided_among_microbatches_too():
    """From 0.12 on ``searchsorted``, ``interp`` and others are such."""
    edges = jnp.linspace(-1, 1, 8)

    def step(w, x):
        def loss(w):
            h = jnp.tanh(x @ w)
            return jnp.mean(h * w[0, jnp.searchsorted(edges, x) % 8].sum(-1, keepdims=True)), jnp.digitize(
                h, edges
            ).sum()

        (value, bins), g = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * g, (value, bins)

    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8), (32, 4)))
    traced = deepcompile.shard(step, {"fsdp": 8}, state_argnums=0, microbatches=2).trace(*shapes)
    assert "no rule" not in str(traced.explain())
    assert (32, 8) not in {eqn.outvars[0].aval.shape for eqn in equations(traced.sharded.jaxpr)}
