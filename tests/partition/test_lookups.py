"""Rows that are looked up in a table are moved, not the table; where the table is needed whole, it is gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jax_deepcompile as deepcompile
from tests.cases import examples
from tests.equality.harness import MESHES, assert_close
from tests.partition.steps import (
    FLAT,
    GATHER,
    HYBRID,
    SCATTER,
    D,
    count,
    moves,
    squares,
    trace_training,
    training_step,
)

V, T = 256, 2
TABLE = {"table": (V, D)}
IDS = {"ids": jax.ShapeDtypeStruct((32, T), jnp.int32), "y": jax.ShapeDtypeStruct((32, T, D), jnp.float32)}


def looked_up(p, batch):
    return squares(jnp.tanh(p["table"][batch["ids"]]), batch)


@pytest.mark.pure
class TestWhatMoves:
    def test_rows_go_to_the_examples_and_their_gradients_back(self):
        assert [move for move in moves(trace_training(looked_up, TABLE, IDS)) if "psum" not in move] == [
            "all_gather fsdp: i32[4,2,1] -> i32[32,2,1]",
            "reduce_scatter fsdp: f32[32,2,16] -> f32[4,2,16]",
            "all_gather fsdp: f32[4,2,16] -> f32[32,2,16]",
        ]

    def test_on_two_axes_rows_move_along_the_one_that_splits_them(self):
        """The gradient is added up along the other one when it is in parts."""
        found = moves(trace_training(looked_up, TABLE, IDS, mesh=HYBRID))
        assert "reduce_scatter fsdp: f32[16,2,16] -> f32[4,2,16]" in found
        assert [move for move in found if f"[{V},{D}]" in move] == []
        assert "psum data: f32[64,16] -> f32[64,16]" in found

    def test_a_table_smaller_than_what_is_looked_up_is_gathered(self):
        found = moves(trace_training(looked_up, {"table": (8, D)}, IDS))
        assert "all_gather fsdp: f32[1,16] -> f32[8,16]" in found
        assert "reduce_scatter fsdp: f32[8,16] -> f32[1,16]" in found

    def test_microbatches_gather_the_table(self):
        """All examples of one microbatch are not what any device works on in its turn."""
        step = training_step(looked_up, optax.sgd(0.1))
        params = {"table": jax.ShapeDtypeStruct((V, D), jnp.float32)}
        state = {"params": params, "opt_state": jax.eval_shape(optax.sgd(0.1).init, params)}
        found = moves(deepcompile.shard(step, FLAT, microbatches=2).trace(state, IDS))
        assert any(move.strip() == "all_gather fsdp: f32[32,16] -> f32[256,16]" for move in found)

    def test_a_table_that_is_multiplied_too_is_gathered_for_that(self):
        def loss(p, batch):
            return squares(jnp.tanh(p["table"][batch["ids"]] @ p["table"].T @ p["table"]), batch)

        found = moves(trace_training(loss, TABLE, IDS))
        assert sum("f32[256,16]" in move and "reduce_scatter" in move for move in found) == 1
        assert "reduce_scatter fsdp: f32[32,2,16] -> f32[4,2,16]" in found
        assert "all_gather fsdp: f32[4,2,16] -> f32[32,2,16]" not in found  # its gradient is scattered anyway

    def test_layers_that_follow_gather_their_own_parameters_only(self):
        def loss(p, batch):
            return squares(jnp.tanh(p["table"][batch["ids"]] @ p["w"]), batch)

        traced = trace_training(loss, TABLE | {"w": (D, D)}, IDS)
        assert not [move for move in moves(traced) if f"[{V}," in move]
        assert count(traced, "reduce_scatter") == 2

    def test_activations_stay_where_they_are(self):
        """Tokens sent to experts are looked up too, but among the examples."""

        def loss(p, batch):
            x = jnp.tanh(batch["x"] @ p["w"])
            return jnp.mean(jax.vmap(lambda rows, order: rows[order])(x, batch["order"]) ** 2)

        batch = {"x": (32, T, D), "order": jax.ShapeDtypeStruct((32, T), jnp.int32)}
        found = moves(trace_training(loss, {"w": (D, D)}, batch))
        assert [move for move in found if "psum" not in move] == [GATHER, SCATTER]


@pytest.mark.cpu_mesh
@examples(8)
@given(
    mesh=st.sampled_from(sorted(MESHES)),
    rows=st.sampled_from([8, 16, 24, 64, 128, 13]),
    width=st.sampled_from([3, 8]),
    tokens=st.sampled_from([(), (1,), (3,), (2, 2)]),
    mode=st.sampled_from(["clip", "fill", "wrap"]),
    layers=st.sampled_from([0, 2]),
    seed=st.integers(0, 99),
)
def test_a_step_is_the_one_of_a_single_device(mesh, rows, width, tokens, mode, layers, seed):
    """Of a table, or of a stack of tables that a loop goes through; ids may be negative or out of bounds."""

    def loss(params, batch):
        def read(table):
            return jnp.take(table, batch["ids"], axis=0, mode=mode, fill_value=2.0)

        def layer(total, table):
            return total + jnp.sin(read(table)), None

        if not layers:
            return jnp.mean((read(params["table"]) - batch["y"]) ** 2)
        return jnp.mean((lax.scan(layer, jnp.zeros_like(batch["y"]), params["table"])[0] - batch["y"]) ** 2)

    random = np.random.default_rng(seed)
    shape = (layers, rows, width) if layers else (rows, width)
    params = {"table": random.normal(size=shape).astype(np.float32)}
    batch = {
        "ids": random.integers(-rows - 2, rows + 2, (16, *tokens)).astype(np.int32),
        "y": random.normal(size=(16, *tokens, width)).astype(np.float32),
    }
    step = training_step(loss, optax.adam(1e-2, eps=1e-3))
    state = {"params": params, "opt_state": optax.adam(1e-2, eps=1e-3).init(params)}
    expected = jax.jit(step)(state, batch)
    found = deepcompile.shard(step, MESHES[mesh], donate=False)(state, batch)
    assert_close(found, expected, 1e-5, f"{shape} on {mesh}")
