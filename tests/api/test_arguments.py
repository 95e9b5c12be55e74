"""Arguments beside the state and the batch, and how they are told apart."""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.ir.program import Role
from tests.api.steps import arguments_of, assert_equal, batch, create, step

pytestmark = pytest.mark.cpu_mesh


def test_extra_arguments_are_replicated():
    def scaled(state, batch, scale, *, offset=0.0):
        state, loss = step(state, {"x": batch["x"] * scale["by"] + offset})
        return loss, state

    found = deepcompile.shard(scaled)(create(), batch(), {"by": 2.0}, offset=1)
    assert_equal(found, jax.jit(scaled)(create(), batch(), {"by": 2.0}, offset=1))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_scalars_in_the_batch_are_replicated(microbatches: int):
    def scaled(state, batch):
        state, loss = step(state, {"x": batch["x"] * batch["scale"]})
        return state, (loss, batch["step"] + 1)

    given = batch() | {"scale": np.float32(2.0), "step": 3}
    sharded = deepcompile.shard(scaled, microbatches=microbatches)
    assert_equal(sharded(create(), given), jax.jit(scaled)(create(), given))
    roles = {port.path: port.role for port in sharded.trace(create(), given).program.inputs}
    assert roles["batch['x']"] is Role.BATCH
    assert roles["batch['scale']"] is roles["batch['step']"] is Role.OTHER


def test_scalars_before_the_batch_are_not_taken_for_it():
    def scaled(state, scale, batch):
        return step(state, {"x": batch["x"] * scale})

    sharded = deepcompile.shard(scaled)
    assert_equal(sharded(create(), 2.0, batch()), jax.jit(scaled)(create(), 2.0, batch()))
    roles = {port.path: port.role for port in sharded.trace(create(), 2.0, batch()).program.inputs}
    assert (roles["scale"], roles["batch['x']"]) == (Role.OTHER, Role.BATCH)


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-2), optax.sgd(1e-2, momentum=0.9), optax.adafactor(1e-2)])
def test_an_optimizer_state_of_its_own_is_state(optimizer):
    def trained(params, moments, x, y):
        def loss_of(params):
            return jnp.mean((x @ params["w"] - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def given():
        params = {"w": jnp.linspace(0.0, 1.0, 256).reshape(16, 16)}
        return params, optimizer.init(params), batch()["x"], np.ones((16, 16), np.float32)

    sharded = deepcompile.shard(trained)
    found, expected = sharded(*given()), jax.jit(trained)(*given())
    assert_equal(found, expected)
    assert_equal(sharded(*found[:2], *given()[2:]), jax.jit(trained)(*expected[:2], *given()[2:]))
    assert arguments_of(sharded) == "state: params, moments; batch: x, y"


def test_several_state_arguments_in_any_order():
    def two(params, x, moments):
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(params)
        moments = 0.9 * moments + grads
        return moments.sum(), moments, params - moments

    args = (create()["w"], batch()["x"], jnp.zeros((16, 8)))
    found = deepcompile.shard(two, state_argnums=(0, 2))(*args)
    assert_equal(found, jax.jit(two)(*args))


def test_explain_names_replicated_inputs_that_look_like_examples():
    def masked(state, batch, weights, *, extra):
        return step(state, {"x": batch["x"] * extra["mask"][:, None] * weights.sum() + extra["shift"][0]})

    sharded = deepcompile.shard(masked)
    x = batch()["x"]
    extra = {"mask": x[:, 0], "shift": np.zeros(3, np.float32)}
    sharded.trace(create(), {"x": x}, np.ones(8, np.float32), extra=extra)
    assert (
        "replicated, though shaped like a batch: extra['mask'] float32[16]; to divide examples among the devices name "
        "their arguments' positions in shard(..., batch_argnums=...)"
    ) in sharded.explain()


def test_batch_argnums_are_all_that_is_divided():
    def labelled(state, images, labels):
        return step(state, {"x": images + 0 * labels[:, None]})

    x = batch()["x"]
    traced = deepcompile.shard(labelled, batch_argnums=1).trace(create(), x, x[:, 0])
    assert {port.path: port.role for port in traced.planned.inputs}["labels"] is Role.OTHER


def test_explain_names_what_is_as_long_as_a_batch_but_replicated():
    def any_name(state, **others):
        return step(state, {"x": others["batch"]["x"] + others["shifts"]["a"][:, None]})

    sharded = deepcompile.shard(any_name)
    sharded.trace(create(), batch=batch(), shifts={"a": np.ones(16), "b": np.ones(3)})
    assert arguments_of(sharded) == "state: state; batch: batch; replicated: shifts"
    assert "  shifts: replicated: not as long as the batch\n" in sharded.explain()
    assert "shaped like a batch: shifts['a'] float32[16]; to divide" in sharded.explain()


@flax.struct.dataclass
class Counter64:
    """Two words, as in brax: what it is given becomes an array."""

    high: jax.Array
    low: jax.Array

    def __post_init__(self):
        if isinstance(self.low, (int, np.ndarray, jax.Array)):
            object.__setattr__(self, "high", jnp.uint32(self.high))
            object.__setattr__(self, "low", jnp.uint32(self.low))


@flax.struct.dataclass
class Checked:
    """Parameters that are arrays and nothing else."""

    w: jax.Array

    def __post_init__(self):
        if not hasattr(self.w, "dtype"):
            raise ValueError(f"expected an array, got {self.w!r}")


@pytest.mark.parametrize("donate", [True, False])
def test_containers_that_look_at_what_they_hold(donate):
    def step(state, batch):
        def loss_of(params):
            return jnp.mean((batch["x"] @ params.w - batch["y"]) ** 2)

        count = state["count"]
        params = jax.tree.map(lambda w, grad: w - 0.1 * grad, state["params"], jax.grad(loss_of)(state["params"]))
        return {"params": params, "count": Counter64(count.high, count.low + 1)}, loss_of(params)

    batch = {"x": np.ones((32, 16), np.float32), "y": np.ones((32, 8), np.float32)}
    expected = sharded = {"params": Checked(jnp.ones((16, 8))), "count": Counter64(0, 0)}
    run = deepcompile.shard(step, mesh={"fsdp": 8}, donate=donate, state_argnums=0)
    sharded = jax.tree.map(jnp.copy, sharded)
    for _ in range(3):
        expected, expected_loss = jax.jit(step)(expected, batch)
        sharded, loss = run(sharded, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(sharded["params"].w, expected["params"].w, rtol=1e-5)
    assert int(sharded["count"].low) == 3
    assert sharded["params"].w.sharding.spec == jax.sharding.PartitionSpec("fsdp")


@jax.tree_util.register_pytree_node_class
class Asking:
    """As jmp's loss scales: it asks what it is made of for a type."""

    def __init__(self, scale):
        self.scale, self.type = scale, jnp.result_type(scale)

    def tree_flatten(self):
        return (self.scale,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.cpu_mesh
def test_a_container_that_checks_what_it_is_made_of():
    """To lower a function JAX makes one of what is neither array nor shape."""

    @deepcompile.shard
    def step(state, batch):
        grad = jax.grad(lambda w: jnp.mean((batch @ w) ** 2) * state["checked"].scale)(state["w"])
        return {"w": state["w"] - grad, "checked": Asking(state["checked"].scale / 2)}

    state, batch = {"w": jnp.eye(8), "checked": Asking(jnp.float32(4))}, jnp.ones((16, 8))
    lowered = step.lower(state, batch)
    for _ in range(2):
        state = step(state, batch)
    assert lowered.compile().memory_analysis() is not None
    assert isinstance(state["checked"], Asking)
    assert state["checked"].scale == 1
    assert not state["w"].sharding.is_fully_replicated
