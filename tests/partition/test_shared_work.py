"""No device multiplies what others do only because an axis had to be taken off the examples."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.work import work_of
from jax_deepcompile.ir.traversal import equations

pytestmark = pytest.mark.pure


def squares(y):
    return jnp.mean(y**2)


def minibatches_in_turn(p, x):
    """Parts of a batch that are trained on one after the other: the first axis may be on the parts."""
    for part in x.reshape(4, 4, 16):
        p = jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(lambda p, part=part: squares(part @ p["up"][0]))(p))
    return p, squares(x)


def experts_that_choose(p, x):
    """Each of four experts chooses six examples: what they read is wanted both by examples and by experts."""

    def loss(p):
        gates, chosen = lax.top_k(jax.nn.softmax(x @ p["route"]).T, 6)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edh->ech", x[chosen], p["up"]))
        made = jnp.einsum("ech,ehd->ecd", hidden, p["down"]) * gates[..., None]
        return squares(jnp.zeros_like(x).at[chosen.reshape(-1)].add(made.reshape(-1, 16)) - x)

    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p)), squares(x)


def flops(jaxpr) -> float:
    return sum(work_of(eqn).flops for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general")


@pytest.mark.parametrize(
    ("step", "mesh", "times"),
    [
        (minibatches_in_turn, {"data": 2, "fsdp": 2}, 1.0),
        (minibatches_in_turn, {"data": 4}, 1.0),
        (experts_that_choose, {"fsdp": 8}, 1.0),
        (experts_that_choose, {"data": 2, "fsdp": 4}, 1.6),  # six are not divided among four, nor four among eight
    ],
)
def test_products_are_shared(step, mesh, times):
    shapes = {"route": (16, 4), "up": (4, 16, 32), "down": (4, 32, 16)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    traced = deepcompile.shard(step, mesh, state_argnums=0).trace(params, jax.ShapeDtypeStruct((16, 16), jnp.float32))
    devices = math.prod(mesh.values())
    assert flops(traced.sharded.jaxpr) * devices <= 1.01 * times * flops(traced.program.jaxpr)
