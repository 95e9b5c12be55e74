"""What is at hand is read and computed once, and only that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.transforms.compute_once import ComputeOnce
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.save_gathered import SavedGathers
from tests.cases import examples
from tests.schedules import product_elements
from tests.transforms.programs import (
    MATRICES,
    assert_same_work,
    compiled_for_h100s,
    h100s,
    matrices_loss,
    outline,
    sharded,
    stack_loss,
    stack_shapes,
)

ROWS = 6


def once(function, *operands):
    """``function`` as a program of no device, before and after."""

    class Program:
        def __init__(self, jaxpr):
            self.jaxpr = jaxpr

        def replace(self, jaxpr):
            return Program(jaxpr)

    program = Program(jax.make_jaxpr(function)(*operands))
    return program, ComputeOnce.apply(program, None, ())


def names(program) -> list[str]:
    return [eqn.primitive.name for eqn in open_jaxpr(program.jaxpr).eqns]


def stored(stack, row, index: int):
    return lax.dynamic_update_slice(stack, row[None], (index, 0))


@pytest.mark.cpu_mesh
def test_the_layer_at_the_turn_is_computed_once():
    program, mesh = sharded(stack_loss, {"stack": stack_shapes()})
    program = SavedGathers.apply(
        program, mesh, [SavedGathers("stack @forward", "stack @backward", ("stack/up", "stack/bias", "stack/down"))]
    )
    pipelined = LoopSchedule.apply(program, mesh, choose_schedules(program))
    merged = ComputeOnce.apply(pipelined, None, ())
    assert names(merged).count("tanh") == names(pipelined).count("tanh") - 1
    assert_same_work(merged, program, mesh)


def turning(params, *where):
    """Pipelined layers whose parameters stay gathered from forward to backward: the program and its mesh."""
    program, mesh = sharded(matrices_loss, params, *where)
    saved = SavedGathers.apply(program, mesh, [SavedGathers("w @forward", "w @backward", ("w",))])
    return LoopSchedule.apply(saved, mesh, choose_schedules(saved)), mesh


@pytest.mark.pure
def test_before_and_after():
    pipelined, _ = turning(MATRICES)
    forward = ["all_gather", "scan 3", "  all_gather", "  dot_general", "  tanh", "dot_general", "tanh"]
    backward = ["scan 3", "  dot_general", "  tanh", *["  dot_general"] * 2, "  reduce_scatter", "reduce_scatter"]
    last_layer = ["dot_general", "dot_general"]
    assert outline(pipelined, "tanh") == [*forward, "dot_general", "tanh", *last_layer, *backward]
    assert outline(ComputeOnce.apply(pipelined, None, ()), "tanh") == [*forward, *last_layer, *backward]


@pytest.mark.pure
@examples(60)
@given(
    stores=st.lists(st.integers(0, ROWS - 1), max_size=4),
    reads=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4),
)
def test_every_row_is_what_was_stored_last(stores, reads):
    def function(stack, rows):
        for place, index in enumerate(stores):
            stack = stored(stack, rows[place], index)
        stack = lax.optimization_barrier(stack)
        return [lax.index_in_dim(stack, index, keepdims=False) for index in reads]

    stack, rows = np.arange(ROWS * 3.0).reshape(ROWS, 3), -1 - np.arange(12.0).reshape(4, 3)
    _, merged = once(function, stack, rows)
    got = jax.core.eval_jaxpr(open_jaxpr(merged.jaxpr), merged.jaxpr.consts, stack, rows)
    for value, expected in zip(got, function(stack, rows), strict=True):
        np.testing.assert_array_equal(value, expected)
    reading = sum(index not in stores for index in set(reads))
    assert names(merged).count("squeeze") - len(stores) <= reading


@pytest.mark.pure
@pytest.mark.parametrize(
    "function",
    [
        lambda stack, row, at: lax.index_in_dim(lax.dynamic_update_slice(stack, row[None], (at, 0)), 2, keepdims=False),
        lambda stack, row, at: lax.index_in_dim(
            lax.dynamic_update_slice(stack, row[None, :2], (2, 0)), 2, keepdims=False
        ),
        lambda stack, row, at: lax.slice(stored(stack, row, 2), (2, 0), (5, 3), (2, 1)),
        lambda stack, row, at: lax.slice(stored(stack, row, 2), (1, 0), (3, 3)),
        lambda stack, row, at: jnp.sin(row) + jnp.sin(lax.optimization_barrier(row)),
        lambda stack, row, at: (jnp.sin(row), jnp.cos(row)),
    ],
    ids=["unknown place", "a part", "with gaps", "more than was stored", "behind a barrier", "different"],
)
def test_what_is_not_at_hand_stays(function):
    program, merged = once(function, np.zeros((ROWS, 3), np.float32), np.ones(3, np.float32), 2)
    assert merged.jaxpr is program.jaxpr


@pytest.mark.pure
def test_equal_work_is_done_once_inside_loops_too():
    def function(stack):
        return lax.scan(lambda total, row: (total + jnp.sin(row) * jnp.sin(row), None), stack[0], stack)[0]

    _, merged = once(function, np.zeros((ROWS, 3), np.float32))
    (loop,) = (eqn for eqn in open_jaxpr(merged.jaxpr).eqns if eqn.primitive.name == "scan")
    inner = [eqn.primitive.name for eqn in open_jaxpr(loop.params["jaxpr"]).eqns]
    assert inner.count("sin") == 1


@pytest.mark.pure
def test_results_that_only_the_second_reads_are_made():
    def function(row):
        return jnp.split(row, [1])[0] * 2, jnp.split(row, [1])[1] * 2

    row = np.arange(3.0, dtype=np.float32)
    _, merged = once(function, row)
    got = jax.core.eval_jaxpr(open_jaxpr(merged.jaxpr), merged.jaxpr.consts, row)
    for value, expected in zip(got, function(row), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.pure
@pytest.mark.parametrize("index", [ROWS + 1, -ROWS - 3])
def test_what_is_stored_beyond_the_ends_is_stored_at_them(index):
    def function(stack, row):
        return [lax.index_in_dim(stored(stack, row, index), at, keepdims=False) for at in (0, 1, ROWS - 1)]

    stack, row = np.zeros((ROWS, 3), np.float32), np.ones(3, np.float32)
    _, merged = once(function, stack, row)
    got = jax.core.eval_jaxpr(open_jaxpr(merged.jaxpr), merged.jaxpr.consts, stack, row)
    for value, expected in zip(got, function(stack, row), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.pure
def test_random_bits_are_drawn_as_often_as_before():
    def function(key):
        return lax.rng_uniform(0.0, 1.0, (3,)) + lax.rng_uniform(0.0, 1.0, (3,)) + key

    program, merged = once(function, np.ones(3, np.float32))
    assert merged.jaxpr is program.jaxpr


@pytest.mark.h100_aot
def test_the_layer_at_the_turn_has_one_product_forward_and_two_backward():
    width, rows = 2048, 8
    pipelined, mesh = turning({"w": (7, width, width)}, (8 * rows, width), h100s())
    before, after = (compiled_for_h100s(each, mesh) for each in (pipelined, ComputeOnce.apply(pipelined, None, ())))
    assert product_elements(read(after.as_text()).entry.instructions) == (rows + rows + width) * width
    assert after.memory_analysis().temp_size_in_bytes <= before.memory_analysis().temp_size_in_bytes
