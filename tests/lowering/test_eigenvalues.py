"""On CPU devices eigenvalues of several matrices are computed one after the other, and are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile import targets
from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.ir.traversal import equations, inline_calls
from jax_deepcompile.lowering import eigenvalues
from jax_deepcompile.lowering.eigenvalues import with_eigenvalues_in_turn
from tests.api.steps import assert_equal
from tests.equality.harness import assert_close


@pytest.fixture(autouse=True)
def hanging(monkeypatch):
    monkeypatch.setattr(eigenvalues, "hangs_on_eigenvalues", lambda: True)


def symmetric(*shape: int) -> jax.Array:
    x = jax.random.normal(jax.random.key(0), (*shape, shape[-1]))
    return x + jnp.swapaxes(x, -1, -2)


def roots(x):
    values, vectors = jnp.linalg.eigh(x)
    return (vectors * jnp.sqrt(jnp.abs(values))[..., None, :]) @ jnp.swapaxes(vectors, -1, -2)


def here():
    return jax.make_mesh((1,), ("fsdp",))


def traced(function, x):
    return inline_calls(jax.make_jaxpr(function)(x))


@pytest.mark.pure
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8), (5, 1)])
def test_batches_are_looped_over(shape):
    x = symmetric(*shape)
    changed = with_eigenvalues_in_turn(traced(roots, x), here())
    (made,) = (eqn for eqn in equations(changed) if eqn.primitive.name == "eigh")
    (loop,) = (eqn for eqn in equations(changed) if eqn.primitive.name == "scan")
    assert made.invars[0].aval.shape == (shape[-1], shape[-1])
    assert loop.params["length"] == x.size // shape[-1] ** 2
    assert_equal(eval_local(changed, [x])[0], roots(x))


@pytest.mark.pure
def test_inside_of_a_loop():
    def looped(x):
        return lax.scan(lambda x, _: (roots(x), None), x, None, length=2)[0]

    x = symmetric(3, 8)
    changed = with_eigenvalues_in_turn(traced(looped, x), here())
    assert [eqn.primitive.name for eqn in equations(changed) if eqn.primitive.name in ("scan", "eigh")] == [
        "scan",
        "scan",
        "eigh",
    ]
    assert_equal(eval_local(changed, [x])[0], looped(x))


@pytest.mark.pure
def test_what_is_left_alone(monkeypatch):
    """A matrix by itself; other decompositions; GPUs, and meshes of no devices; XLA as it is from jax 0.12 on."""
    batch = symmetric(4, 8)
    for function, x in ((roots, batch[0]), (roots, batch[:1]), (jnp.linalg.svd, batch), (jnp.linalg.qr, batch)):
        closed = traced(function, x)
        assert with_eigenvalues_in_turn(closed, here()) is closed
    closed = traced(roots, batch)
    described = targets.h100(nodes=1).make_mesh((8,), ("fsdp",))
    for mesh in (described, here().abstract_mesh):
        assert with_eigenvalues_in_turn(closed, mesh) is closed
    monkeypatch.setattr(eigenvalues, "hangs_on_eigenvalues", lambda: False)
    assert with_eigenvalues_in_turn(closed, here()) is closed


@pytest.mark.cpu_mesh
def test_in_a_step():
    """Whose stacks are fewer than devices, and whole on each; many such steps waited for ever, by chance."""

    def step(state, x):
        gradients = jax.grad(lambda w: jnp.mean((x @ w[0] @ w[1]) ** 2))(state["w"])
        factors = state["factors"] + gradients @ jnp.swapaxes(gradients, -1, -2)
        return {"w": state["w"] - 0.1 * roots(factors) @ gradients, "factors": factors}, jnp.mean(x**2)

    state = {"w": symmetric(2, 16) / 8, "factors": jnp.tile(jnp.eye(16), (2, 1, 1))}
    x = jnp.linspace(-1, 1, 32 * 16).reshape(32, 16)
    sharded = deepcompile.shard(step, {"fsdp": 8}, donate=False)
    calls = [line for line in sharded.lower(state, x).as_text().splitlines() if "syevd" in line]
    assert calls
    assert not any("tensor<2x16x16" in line for line in calls)
    assert_close(sharded(state, x), jax.jit(step)(state, x), 1e-4, "state")
