"""A memory limit holds for whatever runs, of whatever shape, and an error loses nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.planner import limits, session
from jax_deepcompile.transforms.rematerialize import Rematerialized
from tests.api.steps import assert_equal, batch, create, step

pytestmark = pytest.mark.cpu_mesh


@pytest.fixture(scope="module")
def expected():
    return jax.jit(step)(create(), batch())


def test_a_limit_holds_for_what_runs_and_nothing_is_lost(monkeypatch, expected):
    limited = deepcompile.shard(step, memory_limit="1GiB")
    state = limited.init(create)
    limited.plan(state, batch())
    with monkeypatch.context() as patched:
        patched.setattr(limits, "peak_bytes", lambda memory: 2 << 30)
        with pytest.raises(deepcompile.errors.MemoryExceededError, match=r"1\.00 GiB more than the limit of 1\.00 GiB"):
            limited(state, batch())
    assert_equal(limited(state, batch()), expected)


def test_a_limited_step_is_compiled_once_to_run(caplog):
    limited = deepcompile.shard(step, memory_limit="1GiB")
    state = limited.init(create)
    limited.plan(state, batch())
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        state, _ = limited(state, batch())
        limited(state, batch())
    assert len([record for record in caplog.messages if "Finished XLA compilation of jit(step)" in record]) == 1


def test_a_limited_step_in_a_function_of_jax(expected):
    limited = deepcompile.shard(step, memory_limit="1GiB")
    assert_equal(jax.jit(limited)(create(), batch()), expected)


@pytest.mark.parametrize("sizes", [(1 << 19, 16, 16), (16, 1 << 19, 16), (16, 16, 1 << 19)])
def test_each_batch_size_fits_or_not(sizes):
    """64 MiB of examples, 4 MiB a device and more do not; state goes on after that."""
    limited = deepcompile.shard(step, memory_limit="2MiB")
    state = limited.init(create)
    for size in sizes:
        if size > 16:
            with pytest.raises(deepcompile.errors.MemoryExceededError, match=r"more than the limit of 2\.00 MiB"):
                limited(state, batch(size))
        else:
            state, _ = limited(state, batch(size))
    assert int(state["count"]) == 2


def test_a_limit_holds_for_later_shapes(monkeypatch):
    limited = deepcompile.shard(step, memory_limit="1GiB")
    state, _ = limited(limited.init(create), batch(16))
    state, _ = limited(state, batch(16))
    monkeypatch.setattr(limits, "peak_bytes", lambda memory: 2 << 30)
    state, _ = limited(state, batch(16))
    with pytest.raises(deepcompile.errors.MemoryExceededError):
        limited(state, batch(32))


def test_state_and_batch_alone_are_compared_before_anything_is_planned(monkeypatch):
    monkeypatch.setattr(session, "make_plan", None)
    limited = deepcompile.shard(step, memory_limit="1KiB")
    with pytest.raises(deepcompile.errors.MemoryExceededError) as caught:
        limited.plan(create(), batch(4096))
    assert str(caught.value) == (
        "state and batch of step alone take 32,836 bytes a device, 31,812 bytes more than the limit of 1,024 bytes. "
        "Use more devices, or raise memory_limit to at least 32836 and what temporaries take besides."
    )


def test_layers_of_a_loop_are_computed_again_where_a_cpu_has_no_room_for_what_they_keep():
    def loss_of(layers, x):
        return jnp.mean(lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), x, layers)[0] ** 2)

    def layered(layers, x):
        loss, gradients = jax.value_and_grad(loss_of)(layers, x)
        return layers - 0.1 * gradients, loss

    layers, x = jnp.ones((8, 32, 128)) / 32, jnp.ones((4096, 32))
    loose = deepcompile.shard(layered, memory_limit="1GiB").plan(layers, x).prediction
    assert loose is not None
    limited = deepcompile.shard(layered, memory_limit=int(0.6 * loose.peak_bytes))
    plan = limited.plan(layers, x)
    assert plan.of(Rematerialized) == (Rematerialized("layers @forward", "layers @backward"),)
    assert plan.options == ()
    assert_equal(limited(layers, x), jax.jit(layered)(layers, x))
