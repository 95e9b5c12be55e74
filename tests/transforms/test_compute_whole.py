"""Small values computed whole: the same bits, without the gather after the reduction."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.compute_whole import ComputedWhole
from tests.partition.steps import lines
from tests.transforms.programs import WIDTH, assert_same_values, count, sharded

SMALL = 4 * 4 * WIDTH


class Normed(nn.Module):
    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(self.width)(x)))
        return x


def normed(mesh=None, width: int = WIDTH):
    """A step of layers with batch norms, whose running averages are divided."""
    model, optimizer = Normed(width), optax.sgd(0.1, momentum=0.9)

    def step(state, x):
        def loss(params):
            variables = {"params": params, "batch_stats": state["statistics"]}
            y, changed = model.apply(variables, x, mutable=["batch_stats"])
            return jnp.mean(y**2), changed["batch_stats"]

        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "statistics": statistics}, value

    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, WIDTH)))
    state = {
        "params": variables["params"],
        "opt_state": jax.eval_shape(optimizer.init, variables["params"]),
        "statistics": variables["batch_stats"],
    }
    sharded_step = deepcompile.shard(step, mesh or {"fsdp": 8}, state_argnums=0, batch_argnums=1)
    return sharded_step.trace(state, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)).sharded, sharded_step.mesh


def whole(program, mesh, size: int = SMALL):
    return carry_out(program, mesh, [ComputedWhole(size)])


@pytest.fixture(scope="module")
def made():
    return normed()


@pytest.mark.pure
def test_statistics_are_not_gathered(made):
    program, mesh = made
    planned = whole(program, mesh)
    small = f"f32[{WIDTH}]"
    before, after = (lines(each, ("all_gather", "reduce_scatter", "psum")) for each in (program, planned))
    assert sum(line.endswith(small) and line.startswith("psum") for line in after) > sum(
        line.endswith(small) and line.startswith("psum") for line in before
    )
    assert count(planned, "all_gather") < count(program, "all_gather")
    assert count(planned, "reduce_scatter") < count(program, "reduce_scatter")


@pytest.mark.cpu_mesh
def test_values_stay_the_same(made):
    program, mesh = made
    assert_same_values(whole(program, mesh), program, mesh)


@pytest.mark.pure
def test_what_is_larger_stays(made):
    program, mesh = made
    assert whole(program, mesh, 4 * WIDTH - 1) is program


@pytest.mark.pure
def test_parameters_alone_stay_as_they_are():
    program, mesh = sharded(lambda params, x: jnp.mean((x * jnp.exp(params["w"])) ** 2), {"w": (WIDTH,)})
    assert whole(program, mesh) is program


@pytest.mark.pure
def test_axes_of_two_stay_as_they_are():
    program, mesh = normed({"data": 2, "fsdp": 4})
    assert whole(program, mesh) is program


@pytest.mark.pure
def test_no_bytes_are_an_error(made):
    program, mesh = made
    with pytest.raises(errors.PlanError, match="it computes values of -1 bytes whole"):
        whole(program, mesh, -1)


@pytest.mark.pure
def test_what_differs_from_device_to_device_is_not_taken_for_one_value():
    """A part of what is summed over devices later is no number that all have."""

    def loss(params, x):
        scale = jnp.sum(x)
        mean = jnp.mean(x, 0) * params["w"]
        return jnp.mean((x * jnp.tanh(mean * scale)) ** 2)

    program, mesh = sharded(loss, {"w": (WIDTH,)})
    assert_same_values(whole(program, mesh), program, mesh)
