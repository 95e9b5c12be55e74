"""Moments by memory kind under ``jax.jit``, compiled for H100s: what it copies, and what that takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from experiments.host_memory import moments_passing_through, traced, with_moments_on_host
from tests.transforms.programs import h100s

pytestmark = pytest.mark.h100_aot

GPUS, MATRICES, WIDTH = 8, 4, 4096
MOMENT_BYTES = 2 * MATRICES * 4 * WIDTH * WIDTH // GPUS


def step(state: TrainState, x: jax.Array):
    def loss_of(params):
        y = x
        for matrix in params:
            y = jnp.tanh(y @ matrix)
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.parametrize("after_backward", [False, True])
def test_every_moment_is_copied_in_and_out_once_and_the_simulator_sees_it(after_backward):
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * MATRICES
    state = jax.eval_shape(lambda params: TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3)), params)
    given, mesh = (state, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)), h100s()
    program = with_moments_on_host(deepcompile.shard(step, mesh, passes=()).trace(*given).sharded)
    passing = moments_passing_through(step, after_backward)
    compiled = traced(passing, given, program, mesh).lower(lowering_platforms=("cuda",)).compile()
    memory: Any = compiled.memory_analysis()
    simulation = deepcompile.simulate(compiled, mesh)
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == MOMENT_BYTES
    assert memory.host_temp_size_in_bytes == 0
    rate = deepcompile.targets.h100().hardware.to_host_bytes_per_s
    assert simulation.copy_s == pytest.approx(2 * MOMENT_BYTES / rate, rel=0.1), "what is alone on its link"
    assert 0 < simulation.exposed_copy_s <= simulation.copy_s
