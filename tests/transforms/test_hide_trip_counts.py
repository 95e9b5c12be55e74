"""Loops that XLA cannot count compute the same bits, and are left as they are by it."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jax_deepcompile.hlo.reader import read
from jax_deepcompile.hlo.trip_counts import trip_count
from jax_deepcompile.transforms.decision import replace_loops
from jax_deepcompile.transforms.microbatch_loops import hidden_trip_count
from tests.schedules import gathers, instructions
from tests.transforms.programs import (
    MATRICES,
    STACK,
    WIDTH,
    assert_same_values,
    backwards_loss,
    compiled_for_h100s,
    count,
    h100s,
    inner_loops,
    loop_names,
    matrices_loss,
    outer_loops,
    outline,
    run_stack,
    sharded,
    stack_loss,
)

TRIPS = 6


def nested_loss(params, batch):
    def again(x, _):
        return run_stack(params["stack"], x), None

    return jnp.mean(lax.scan(again, batch, None, length=2)[0] ** 2)


def hide_trip_counts(program, mesh, loops):
    return replace_loops(program, mesh, dict.fromkeys(loops, hidden_trip_count))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("loss", [stack_loss, backwards_loss, nested_loss], ids=["forward", "reverse", "nested"])
def test_values_stay_the_same(loss):
    program, mesh = sharded(loss, STACK)
    hidden = hide_trip_counts(program, mesh, loop_names(program))
    assert count(hidden, "scan") == 0
    assert count(hidden, "while") > 0
    assert_same_values(hidden, program, mesh)


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(matrices_loss, MATRICES)
    layers = ["  all_gather", "  dot_general"]
    before = outline(program, "optimization_barrier")
    assert before[:3] == ["scan 4", *layers]
    after = outline(hide_trip_counts(program, mesh, ["w @forward"]), "optimization_barrier")
    assert after == ["optimization_barrier", "while", *layers, *before[3:]]


@pytest.mark.pure
def test_only_the_named_loops_change():
    program, mesh = sharded(nested_loss, STACK)
    hidden = hide_trip_counts(program, mesh, loop_names(program, outer_loops))
    assert count(hidden, "while", executed=False) == len(outer_loops(program))
    assert count(hidden, "scan", executed=False) == len(inner_loops(program))


@pytest.mark.pure
@pytest.mark.parametrize("names", [[], ["stack"], ["scan.0"]])
def test_nothing_named_changes_nothing(names):
    program, mesh = sharded(stack_loss, STACK)
    assert hide_trip_counts(program, mesh, names) is program


@pytest.fixture(scope="module")
def compiled():
    """The while loops of one layer stack's step on 8 H100s: as it is, and with its loops hidden."""

    def loss(params, x):
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2)

    width = 8 * WIDTH
    program, mesh = sharded(loss, {"w": (TRIPS, width, width)}, (64, width), h100s(), optax.sgd(0.1))
    hidden = hide_trip_counts(program, mesh, loop_names(program))
    return [read(compiled_for_h100s(each, mesh).as_text() or "") for each in (program, hidden)]


def loops_of(module):
    return [each for each in instructions(module) if each.opcode == "while"]


def gathers_in(module, loop) -> int:
    return gathers(module.body(loop).instructions)


@pytest.mark.h100_aot
def test_a_hidden_loop_is_still_counted_by_us(compiled):
    _, hidden = compiled
    assert [trip_count(hidden, loop) for loop in loops_of(hidden)] == [TRIPS, TRIPS]


@pytest.mark.h100_aot
def test_a_hidden_loop_is_not_doubled(compiled):
    plain, hidden = compiled
    assert [gathers_in(plain, loop) for loop in loops_of(plain)] == [2, 2]
    assert [gathers_in(hidden, loop) for loop in loops_of(hidden)] == [1, 1]
