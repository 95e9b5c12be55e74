"""Steps written for ``jax.pmap`` name its axis: they see the whole batch, and are alone along it."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from tests.api.steps import assert_equal

pytestmark = pytest.mark.cpu_mesh


class State(TrainState):
    statistics: Any


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Dense(16, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name="batch")(x))
        return nn.Dense(4)(x)


NET, OPTIMIZER = Net(), optax.sgd(0.1)
RANDOM = np.random.RandomState(0)
BATCH = {"x": RANDOM.randn(16, 8).astype(np.float32), "y": RANDOM.randint(0, 4, 16).astype(np.int32)}


def create():
    made = NET.init(jax.random.key(0), BATCH["x"])
    return State.create(apply_fn=NET.apply, params=made["params"], tx=OPTIMIZER, statistics=made["batch_stats"])


def train_step(state, batch):
    def loss_of(params):
        variables = {"params": params, "batch_stats": state.statistics}
        logits, new = jax.checkpoint(lambda x: state.apply_fn(variables, x, mutable=["batch_stats"]))(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        summed, _ = lax.scan(lambda total, one: (total + lax.psum(one, ("batch", "model")), None), 0.0, losses)
        return summed / lax.psum(losses.size, "batch"), new

    (loss, new), gradients = jax.value_and_grad(jax.jit(loss_of), has_aux=True)(state.params)
    gradients = lax.pmean(gradients, axis_name="batch")
    largest = lax.cond(loss > 0, lambda: lax.pmax(loss, "batch"), lambda: 0.0)
    gathered = lax.all_gather(loss, "batch")
    metrics = {
        "loss": lax.pmean(loss, "batch"),
        "largest": largest,
        "mean": gathered.mean(),
        "place": lax.axis_index("batch"),
        "parts": lax.psum_scatter(gathered, "batch"),
        "next": lax.ppermute(loss, "batch", [(0, 0)]),
    }
    return state.apply_gradients(grads=gradients, statistics=new["batch_stats"]), metrics


@contextlib.contextmanager
def deepcompile_log():
    """The package's warnings, collected."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("jax_deepcompile")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def of_one(step, state, batch):
    """What ``pmap`` on one device computes."""
    mapped = jax.vmap(jax.vmap(step, axis_name="model"), axis_name="batch")
    args = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None, None], (state, batch))
    return jax.tree.map(lambda leaf: leaf[0, 0], mapped(*args))


def test_what_devices_exchange_is_there_already():
    sharded = deepcompile.shard(train_step)
    state, expected = create(), create()
    for _ in range(2):
        (state, metrics), (expected, metrics_expected) = sharded(state, BATCH), of_one(train_step, expected, BATCH)
        assert_equal((state, metrics), (expected, metrics_expected))
    assert sharded.validate(state, BATCH).agrees
    assert sharded.lower_gspmd(state, BATCH).compile() is not None


def test_objects_are_updated_in_place():
    def step(mean):
        def named(model, optimizer, batch):
            loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(batch["x"]) ** 2))(model)
            optimizer.update(model, mean(gradients))
            return mean(loss)

        return named

    def objects():
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    ours, theirs = objects(), objects()
    sharded, plain = deepcompile.shard(step(lambda tree: lax.pmean(tree, "batch"))), nnx.jit(step(lambda tree: tree))
    for _ in range(3):
        assert_equal(sharded(*ours, BATCH), plain(*theirs, BATCH))
    assert_equal(nnx.state(ours), nnx.state(theirs))


def test_of_one_device_there_is_nothing_to_swap_and_nobody_to_send_anything():
    def step(state, batch):
        row = batch["x"][:1]
        swapped, sent = lax.all_to_all(row, "batch", 0, 1), lax.ppermute(row, "batch", [])
        return {"w": state["w"] + sent}, swapped

    state, swapped = deepcompile.shard(step, state_argnums=0)({"w": jnp.ones((1, 8))}, BATCH)
    assert_equal((state, swapped), ({"w": jnp.ones((1, 8))}, jnp.asarray(BATCH["x"][:1].T)))


def test_what_happens_once_happens_once(capfd):
    def step(state, batch):
        jax.debug.print("once")
        return {"w": state["w"] - lax.pmean(batch["x"].mean(), "batch")}, batch["x"].mean()

    with deepcompile_log() as lines:
        deepcompile.shard(step, state_argnums=0)({"w": jnp.ones(8)}, BATCH)[1].block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("once") == 1
    assert lines == [
        "step names the axis 'batch', which nothing maps it over: it is alone along it, and sees the whole batch"
    ]


def test_an_axis_of_what_maps_the_sharded_step():
    """Whichever comes first: neither takes what was compiled for the other."""

    def step(state, batch):
        return state, lax.psum(batch.sum(), "batch")

    sharded, batch = deepcompile.shard(step), jnp.ones((2, 16, 8))
    assert sharded({"w": jnp.zeros(8)}, batch[0])[1] == 128
    sharded({"w": jnp.zeros(8)}, batch[0])
    with pytest.raises(errors.AxisNameError, match="batch is an axis of what maps the sharded step"):
        jax.vmap(sharded, in_axes=(None, 0), axis_name="batch")({"w": jnp.zeros(8)}, batch)


def test_in_a_shard_map_of_the_steps_own():
    """Its axes are its own, also of the same name."""

    def step(state, batch):
        def inner(x):
            return lax.psum(lax.pmean(x, "model").sum(), "batch")

        own = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
        total = jax.shard_map(inner, mesh=own, in_specs=P("batch"), out_specs=P(), check_vma=False)(batch["x"])
        return state, total + lax.psum(1.0, "batch") + lax.pmean(batch["x"].sum(), "batch")

    _, total = deepcompile.shard(step)({"w": jnp.zeros(8)}, BATCH)
    assert_equal(total, jnp.float32(2 * BATCH["x"].sum() + 1))


def test_an_axis_beside_dimensions_of_a_vmap():
    def step(state, batch):
        return state, jax.vmap(lambda x: lax.psum(x, ("batch", "rows")), axis_name="rows")(batch["x"]).sum()

    with pytest.raises(errors.AxisNameError, match=r"unbound axis name: batch, together with \(0,\)"):
        deepcompile.shard(step).trace({"w": jnp.zeros(8)}, BATCH)
