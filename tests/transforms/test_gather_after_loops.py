"""Gathers wait for the loops before them, and for nothing else."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.transforms.decision import loop_named
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.wait_at_loops import GatherAfterLoops
from tests.schedules import gathers
from tests.transforms.programs import (
    FOOTED,
    HEADED,
    IDLE,
    UNDER_A_HEAD,
    assert_same_work,
    barriers,
    compiled_for_h100s,
    footed_loss,
    h100s,
    headed_loss,
    idle_loop_loss,
    in_two_iterations,
    matrices_loss,
    matrices_under_a_head_loss,
    outline,
    sharded,
)


@pytest.mark.cpu_mesh
def test_a_gather_waits_for_the_loop_before_it():
    program, mesh = sharded(headed_loss, HEADED)
    waiting = GatherAfterLoops.apply(program, None, ())
    assert barriers(waiting.jaxpr) == barriers(program.jaxpr) + 1
    assert_same_work(waiting, program, mesh)


@pytest.mark.cpu_mesh
def test_so_does_one_inside_of_another_loop():
    program, mesh = sharded(in_two_iterations(headed_loss), HEADED)
    after = GatherAfterLoops.apply(program, None, ())
    outer, waiting = (loop_named(each, "whole", "looks into") for each in (program, after))
    assert barriers(waiting.eqn.params["jaxpr"]) == barriers(outer.eqn.params["jaxpr"]) + 1
    assert_same_work(after, program, mesh)


@pytest.mark.pure
def test_before_and_after():
    program, _ = sharded(matrices_under_a_head_loss, UNDER_A_HEAD)
    layers = ["scan 4", "  all_gather", "  dot_general"]
    gathered = ["all_gather", "dot_general"]
    before, after = (
        outline(each, "optimization_barrier") for each in (program, GatherAfterLoops.apply(program, None, ()))
    )
    assert before[:5] == [*layers, *gathered]
    assert after[:6] == [*layers, "optimization_barrier", *gathered]
    assert after[6:] == before[5:]


@pytest.mark.pure
def test_what_was_gathered_before_the_loop_does_not_wait():
    program, _ = sharded(footed_loss, FOOTED)
    assert GatherAfterLoops.apply(program, None, ()) is program


@pytest.mark.cpu_mesh
def test_gathers_of_the_same_wait_alike():
    """XLA merges the gather of the head for forward with that for backward, as both wait in the same way."""
    program, mesh = sharded(
        lambda params, batch: headed_loss(params, jnp.sin(batch)) + headed_loss(params, batch), HEADED
    )
    waiting = GatherAfterLoops.apply(program, None, ())
    operands = [eqn.invars[0] for eqn in open_jaxpr(waiting.jaxpr).eqns if eqn.primitive.name == "all_gather"]
    before = [eqn.invars[0] for eqn in open_jaxpr(program.jaxpr).eqns if eqn.primitive.name == "all_gather"]
    assert len(set(operands)) == len(set(before))
    assert_same_work(waiting, program, mesh)


@pytest.mark.pure
def test_nothing_waits_for_a_loop_that_does_not_communicate():
    program, _ = sharded(idle_loop_loss, IDLE)
    assert GatherAfterLoops.apply(program, None, ()) is program


@pytest.mark.h100_aot
def test_what_backward_begins_with_is_gathered_after_forward():
    """And not before it, where XLA makes one gather of it and the first layer's."""
    width = 1024
    program, mesh = sharded(matrices_loss, {"w": (6, width, width)}, (64, width), h100s(), optax.sgd(0.1))
    pipelined = LoopSchedule.apply(program, mesh, choose_schedules(program))

    def between_loops(program) -> int:
        entry = read(compiled_for_h100s(program, mesh).as_text()).entry.instructions
        forward, backward = (place for place, each in enumerate(entry) if each.opcode == "while")
        return gathers(entry[forward:backward])

    assert between_loops(pipelined) == 0
    assert between_loops(GatherAfterLoops.apply(pipelined, None, ())) == 1
