"""Losses that index the batch dimension with an iota leave activations where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_deepcompile as deepcompile
from tests.equality.harness import assert_same_training

B, S, D, V = 16, 6, 16, 24


def hidden(params, batch):
    return jnp.tanh(batch["x"] @ params["w"])


def label_of_each_example(params, batch):
    log_probs = jax.nn.log_softmax(hidden(params, batch)[:, 0] @ params["out"])
    return -log_probs[jnp.arange(B), batch["labels"][:, 0]].mean()


def label_of_each_token(params, batch):
    log_probs = jax.nn.log_softmax(hidden(params, batch) @ params["out"])
    return -log_probs[jnp.arange(B)[:, None], jnp.arange(S)[None], batch["labels"]].mean()


def last_token_of_each_sequence(params, batch):
    last = hidden(params, batch)[np.arange(B), batch["lengths"] - 1]
    return jnp.mean((last @ params["out"]) ** 2)


def positions_of_each_sequence(params, batch):
    picked = hidden(params, batch)[jnp.arange(B)[:, None], batch["labels"] % S]
    return jnp.mean((picked @ params["out"]) ** 2)


def updated_positions(params, batch):
    x = hidden(params, batch)
    x = x.at[jnp.arange(B), batch["lengths"] - 1].set(0.5).at[jnp.arange(B), 0].add(x[:, 1])
    return jnp.mean((x @ params["out"]) ** 2)


def rows_in_another_order(params, batch):
    log_probs = jax.nn.log_softmax(hidden(params, batch)[:, 0] @ params["out"])
    return -log_probs[jnp.arange(B)[::-1], batch["labels"][:, 0]].mean()


LOSSES = [
    label_of_each_example,
    label_of_each_token,
    last_token_of_each_sequence,
    positions_of_each_sequence,
    updated_positions,
]


def step_of(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def create_params(key):
    first, second = jax.random.split(key)
    return {"w": jax.random.normal(first, (D, D)) / 4, "out": jax.random.normal(second, (D, V)) / 4}


def make_batch(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((B, S, D), np.float32),
        "labels": random.integers(0, V, (B, S), np.int32),
        "lengths": random.integers(1, S + 1, B, np.int32),
    }


def moving_equations(loss) -> list[str]:
    shapes = jax.eval_shape(create_params, jax.random.key(0))
    traced = deepcompile.shard(step_of(loss), {"fsdp": 8}).trace(shapes, make_batch(0))
    return [
        step.eqn.primitive.name
        for step, _ in traced.partitioned.layout.walk()
        if any(fetch.moves_activation for fetch in step.fetches)
    ]


@pytest.mark.pure
@pytest.mark.parametrize("loss", LOSSES)
def test_no_activation_moves(loss):
    assert moving_equations(loss) == []


@pytest.mark.pure
def test_activations_move_where_rows_are_exchanged():
    assert moving_equations(rows_in_another_order)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_step_on_one_device(loss):
    assert_same_training(step_of(loss), create_params, [make_batch(seed) for seed in range(2)], {"8": {"fsdp": 8}})
