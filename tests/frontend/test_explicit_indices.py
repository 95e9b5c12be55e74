"""Losses that index the batch dimension with an iota leave activations where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.frontend.canonicalize.explicit_indices import _INDEXED, without_explicit_indices
from jax_deepcompile.ir.traversal import equations, inline_calls
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


def beams_of_each_sequence(params, batch):
    example = jnp.reshape(jnp.arange(B * S) // S, (B, S))
    picked = hidden(params, batch)[example, batch["labels"] % S]
    return jnp.mean((picked @ params["out"]) ** 2)


def beams_found_in_a_loop(params, batch):
    example = jnp.reshape(jnp.arange(B * S) // S, (B, S))
    x, _ = jax.lax.scan(lambda x, _: (x[example, batch["labels"] % S], None), hidden(params, batch), None, length=2)
    return jnp.mean((x @ params["out"]) ** 2)


def pairs_of_each_example(params, batch):
    x = hidden(params, batch)
    products = jnp.einsum("bsd,btd->bst", x, x)
    pairs = jnp.tile(jnp.array(jnp.triu_indices(S)), [1, B])
    example = jnp.tile(jnp.arange(B)[:, None], [1, S * (S + 1) // 2]).reshape(1, -1)
    picked = products[tuple(jnp.concatenate([example, pairs]))].reshape(B, -1)
    return jnp.mean((picked @ jnp.resize(params["out"], (picked.shape[1], 2))) ** 2)


def updated_positions(params, batch):
    x = hidden(params, batch)
    x = x.at[jnp.arange(B), batch["lengths"] - 1].set(0.5).at[jnp.arange(B), 0].add(x[:, 1])
    return jnp.mean((x @ params["out"]) ** 2)


def rows_in_another_order(params, batch):
    log_probs = jax.nn.log_softmax(hidden(params, batch)[:, 0] @ params["out"])
    return -log_probs[jnp.arange(B)[::-1], batch["labels"][:, 0]].mean()


def beams_of_others(params, batch):
    example = jnp.reshape((jnp.arange(B * S) + 1) // S % B, (B, S))
    return jnp.mean((hidden(params, batch)[example, batch["labels"] % S] @ params["out"]) ** 2)


LOSSES = [
    label_of_each_example,
    label_of_each_token,
    last_token_of_each_sequence,
    positions_of_each_sequence,
    beams_of_each_sequence,
    beams_found_in_a_loop,
    pairs_of_each_example,
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
@pytest.mark.parametrize("loss", [rows_in_another_order, beams_of_others])
def test_activations_move_where_rows_are_exchanged(loss):
    assert moving_equations(loss)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_step_on_one_device(loss):
    assert_same_training(step_of(loss), create_params, [make_batch(seed) for seed in range(2)], {"8": {"fsdp": 8}})


ROWS = jnp.arange(4).repeat(3)
PLACES = (7 * jnp.arange(12)) % 5

BY_BLOCKS = {
    "windows after": lambda x: x[ROWS, PLACES],
    "windows before": lambda x: jnp.moveaxis(x, (0, 1), (1, 2))[:, ROWS, PLACES],
    "windows between": lambda x: jnp.moveaxis(x, 1, 2)[ROWS, :, PLACES],
    "in the second dimension": lambda x: x[jnp.stack([ROWS, ROWS]), jnp.stack([PLACES, PLACES[::-1]])],
    "beside another": lambda x: x[jnp.broadcast_to(ROWS[:, None], (12, 5)), jnp.arange(5)],
    "added": lambda x: x.at[ROWS, PLACES].add(jnp.arange(12.0)[:, None]),
    "put in the second dimension": lambda x: jnp.moveaxis(x, 1, 2).at[ROWS[None], :, PLACES[None]].set(3.0),
    "beyond the end": lambda x: x.at[ROWS, PLACES + 2].get(mode="fill", fill_value=-1),
}


@pytest.mark.pure
@pytest.mark.parametrize("name", BY_BLOCKS)
def test_several_indices_for_each_row(name):
    x, function = jnp.arange(4 * 5 * 2.0).reshape(4, 5, 2), BY_BLOCKS[name]
    before = inline_calls(jax.make_jaxpr(lambda x: (function(x), jax.grad(lambda x: jnp.sum(function(x) ** 2))(x)))(x))
    after = without_explicit_indices(before)
    jex.check_jaxpr(open_jaxpr(after))
    indexed = [eqn.params["dimension_numbers"] for eqn in equations(after) if eqn.primitive.name in _INDEXED]
    assert all(batching for *_, batching in indexed)
    for made, expected in zip(jex.jaxpr_as_fun(after)(x), jex.jaxpr_as_fun(before)(x), strict=True):
        np.testing.assert_array_equal(made, expected)


@pytest.mark.pure
def test_no_index_at_all():
    closed = inline_calls(jax.make_jaxpr(lambda x: jnp.take_along_axis(x, jnp.zeros((0, 4), int), 0))(jnp.ones((3, 4))))
    assert [var.aval.shape for var in without_explicit_indices(closed).jaxpr.outvars] == [(0, 4)]
