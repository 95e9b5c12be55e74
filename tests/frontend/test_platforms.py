"""Of what depends on the platform only what runs there is left, wherever it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import tpu

import jax_deepcompile as deepcompile
from jax_deepcompile.frontend.canonicalize.platforms import with_branches_chosen
from jax_deepcompile.ir.traversal import equations, inline_calls

X = jnp.ones((8, 4))


def on_tpus(x: jax.Array) -> jax.Array:
    def kernel(read, written):
        written[...] = read[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, out_shape=shape, compiler_params=tpu.CompilerParams())(x)


@jax.custom_vjp
def twice(x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, tpu=on_tpus, default=lambda x: x * 2)


twice.defvjp(lambda x: (twice(x), None), lambda _, g: (twice(g),))


def primitives(function, platform: str) -> list[str]:
    closed = inline_calls(jax.make_jaxpr(function)(X))
    return [eqn.primitive.name for eqn in equations(with_branches_chosen(closed, platform))]


@pytest.mark.pure
class TestBranches:
    def test_golden(self):
        def step(x):
            return lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos, default=jnp.tan)

        closed = inline_calls(jax.make_jaxpr(step)(X))
        assert [line.strip() for line in str(with_branches_chosen(closed, "cuda")).splitlines()] == [
            "{ lambda ; a:f32[8,4]. let",
            "_:i32[] = platform_index[platforms=(('cpu',), ('cuda',), None)]",
            "b:f32[8,4] = cos a",
            "in (b,) }",
        ]
        assert primitives(step, "cpu")[1:] == ["sin"]
        assert primitives(step, "tpu")[1:] == ["tan"]

    def test_in_loops_and_their_gradients(self):
        def loss(x):
            body = jax.checkpoint(lambda x, _: (lax.platform_dependent(x, cpu=jnp.sin, default=jnp.tan), None))
            return jnp.sum(lax.scan(body, x, None, length=3)[0])

        found = primitives(jax.grad(loss), "cpu")
        assert {"sin", "cos", "scan"} <= set(found)
        assert not {"cond", "tan"} & set(found)

    def test_for_each_of_a_batch(self):
        found = primitives(jax.vmap(lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.tan)), "cuda")
        assert "tan" in found
        assert not {"cond", "sin"} & set(found)

    def test_branches_of_the_steps_own_stay(self):
        def step(x):
            return lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

        closed = inline_calls(jax.make_jaxpr(step)(X))
        assert with_branches_chosen(closed, "cuda") is closed

    def test_what_has_no_branch_for_the_platform_stays(self):
        """JAX's error names the platforms there are."""
        assert "cond" in primitives(lambda x: lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.tan), "cuda")


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("microbatches", [1, 2])
def test_kernels_for_other_devices_are_no_part_of_a_step(microbatches):
    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(twice(x @ w)), None))
        return jnp.mean(lax.scan(layer, x, w)[0] ** 2) - jnp.mean(jnp.sum(x * twice(x), axis=1))

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    w, x = jax.random.normal(jax.random.key(0), (2, 16, 16)), jax.random.normal(jax.random.key(1), (16, 16))
    expected = jax.jit(step)(w, x)
    found = deepcompile.shard(step, {"fsdp": 8}, microbatches=microbatches)(jnp.copy(w), x)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), found, expected)
