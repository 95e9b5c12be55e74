"""Loops wait for the reductions before them, and for nothing else."""

from __future__ import annotations

import optax
import pytest

from jax_deepcompile.hlo.reader import read
from jax_deepcompile.hlo.types import bytes_of
from jax_deepcompile.transforms.wait_at_loops import ReduceBeforeLoops
from tests.transforms.programs import (
    FOOTED,
    HEADED,
    IDLE,
    STACK,
    UNDER_A_HEAD,
    assert_same_values,
    barriers,
    compiled_for_h100s,
    count,
    footed_loss,
    h100s,
    headed_loss,
    idle_loop_loss,
    matrices_under_a_head_loss,
    outline,
    sharded,
    stack_loss,
)


@pytest.mark.cpu_mesh
def test_values_stay_the_same():
    program, mesh = sharded(headed_loss, HEADED)
    waiting = ReduceBeforeLoops.apply(program, None, ())
    assert barriers(waiting.jaxpr) == barriers(program.jaxpr) + 1
    for name in ("all_gather", "reduce_scatter", "dot_general"):
        assert count(waiting, name) == count(program, name)
    assert_same_values(waiting, program, mesh)


@pytest.mark.pure
def test_before_and_after():
    program, _ = sharded(matrices_under_a_head_loss, UNDER_A_HEAD)
    barrier = "optimization_barrier"
    forward = ["scan 4", "  all_gather", "  dot_general"]
    head = ["all_gather", "dot_general", "dot_general", "reduce_scatter", "dot_general"]
    backward = ["scan 4", f"  {barrier}", *forward[1:], "  dot_general", "  reduce_scatter", "  dot_general"]
    assert outline(program, barrier) == [*forward, *head, *backward]
    assert outline(ReduceBeforeLoops.apply(program, None, ()), barrier) == [*forward, *head, barrier, *backward]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("loss", "params"),
    [(stack_loss, STACK), (footed_loss, FOOTED)],
    ids=["nothing before", "only after"],
)
def test_loops_that_nothing_is_reduced_before_do_not_wait(loss, params):
    program, _ = sharded(loss, params)
    assert ReduceBeforeLoops.apply(program, None, ()) is program


@pytest.mark.pure
def test_a_loop_that_does_not_communicate_does_not_wait():
    program, _ = sharded(idle_loop_loss, IDLE)
    assert ReduceBeforeLoops.apply(program, None, ()) is program


@pytest.mark.h100_aot
def test_the_reduction_ends_before_the_loop():
    width = 1024
    params, batch = {"w": (6, width, width), "head": (width, 8 * width)}, (8192, width)
    program, mesh = sharded(matrices_under_a_head_loss, params, batch, h100s(), optax.sgd(0.1))

    def reduced_in_time(program) -> bool:
        """Whether the gradient of the head is reduced before the last loop."""
        entry = read(compiled_for_h100s(program, mesh).as_text()).entry.instructions
        backward = max(place for place, each in enumerate(entry) if each.opcode == "while")
        reductions = [each for each in entry[:backward] if each.opcode in ("reduce-scatter", "reduce-scatter-done")]
        return any(bytes_of(each.shape) >= 4 * width * width for each in reductions)

    assert not reduced_in_time(program)
    assert reduced_in_time(ReduceBeforeLoops.apply(program, None, ()))
