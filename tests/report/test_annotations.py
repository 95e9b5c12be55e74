"""Which of the user's own sharding annotations ``explain()`` lists: those that are not followed, at the user's line."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile

pytestmark = pytest.mark.pure

P = PartitionSpec
SHAPES = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}, jax.ShapeDtypeStruct((16, 16), jnp.float32)


def on(mesh: dict[str, int], *spec) -> NamedSharding:
    made = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    return NamedSharding(made, P(*spec))


FSDP, OTHER, WHOLE = on({"fsdp": 8}, "fsdp"), on({"x": 8}, "x"), on({"fsdp": 8})
PARTLY = on({"a": 2, "b": 4}, None, "b")


def step_of(inner: Callable) -> Callable:
    def step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(inner(batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad}, loss

    return step


def gradient_step(annotate: Callable) -> Callable:
    def step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * annotate(grad)}, loss

    return step


def listed(step: Callable, mesh: dict[str, int] | None = None) -> list[str]:
    text = str(deepcompile.shard(step, mesh or {"fsdp": 8}).trace(*SHAPES).explain())
    _, _, found = text.partition("sharding annotations not followed, as divisions are derived here:\n")
    return [line.strip() for line in found.partition("\n\n")[0].splitlines()]


PLAIN = step_of(lambda y: y)


@pytest.mark.parametrize(
    "step",
    [
        jax.jit(PLAIN, out_shardings=({"w": FSDP}, None)),
        jax.jit(PLAIN, out_shardings=(None, WHOLE)),
        jax.jit(PLAIN, in_shardings=({"w": FSDP}, FSDP), out_shardings=({"w": FSDP}, WHOLE)),
        gradient_step(jax.jit(lambda grad: grad, out_shardings=FSDP)),
        gradient_step(lambda grad: lax.with_sharding_constraint(grad, FSDP)),
        step_of(jax.jit(jnp.tanh, in_shardings=FSDP, out_shardings=FSDP)),
    ],
    ids=["state", "loss", "all", "gradients by jit", "gradients by constraint", "activations"],
)
def test_what_is_divided_as_asked_where_it_is_used_is_followed(step):
    assert listed(step) == []


def in_shard_map(body: Callable) -> Callable:
    return jax.shard_map(body, mesh=PARTLY.mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})


@pytest.mark.parametrize(
    ("inner", "asked"),
    [
        (lambda y: in_shard_map(lambda v: lax.with_sharding_constraint(v, P(None, "b")))(y), "P(None, 'b')"),
        (lambda y: in_shard_map(lambda v: jax.jit(jnp.tanh, out_shardings=PARTLY)(v))(y), "P(None, 'b')"),
        (lambda y: jax.device_put(y, jax.devices()[3]), str(jax.devices()[3])),
        (lambda y: jax.checkpoint(jax.jit(jnp.tanh, out_shardings=OTHER))(y), "P('x',)"),
        (lambda y: lax.map(jax.jit(jnp.tanh, out_shardings=OTHER), y), "P('x',)"),
        (lambda y: lax.cond(y.sum() > 0, jax.jit(jnp.tanh, out_shardings=OTHER), lambda y: y, y), "P('x',)"),
    ],
    ids=["constraint in shard_map", "jit in shard_map", "device", "checkpoint", "map", "cond"],
)
def test_what_is_not_followed_is_listed_at_the_users_line(inner, asked):
    found = listed(step_of(inner), {"data": 2, "fsdp": 4})
    assert found
    lines = [*range(inspect.getsourcelines(inner)[1], inspect.getsourcelines(inner)[1] + 1)]
    step_line = inspect.getsourcelines(step_of(inner))[1] + 1
    for line in found:
        sharding, _, where = line.partition(" at ")
        assert sharding == asked
        assert where.split(" ")[0] in [f"tests/report/test_annotations.py:{number}" for number in (*lines, step_line)]


def test_a_jit_around_the_whole_step_is_listed_at_a_line_of_the_step():
    found = listed(jax.jit(PLAIN, in_shardings=({"w": WHOLE}, None)))
    assert len(found) == 1
    assert found[0].startswith("P() at tests/report/test_annotations.py:")
