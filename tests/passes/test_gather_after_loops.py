"""Gathers wait for the loops before them, and for nothing else."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.lowering.compile import compile_options
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.lowering.hlo import read
from jax_deepcompile.passes.gather_after_loops import gather_after_loops
from tests.passes.programs import (
    IDLE,
    WIDTH,
    assert_same_work,
    idle_loop_loss,
    in_two_iterations,
    run_stack,
    sharded,
    sharded_under_a_head,
    stack_shapes,
)

HEADED = {"stack": stack_shapes(), "head": (WIDTH, 8 * WIDTH)}
FOOTED = {"stack": stack_shapes(), "foot": (WIDTH, WIDTH)}


def headed_loss(params, batch):
    """Layers under a head, which is gathered after them."""
    return jnp.mean((run_stack(params["stack"], batch) @ params["head"]) ** 2)


def footed_loss(params, batch):
    """Layers on a foot, which is gathered before them; and again after them, which XLA sees is not needed."""
    return jnp.mean(run_stack(params["stack"], batch @ params["foot"]) ** 2)


def barriers(jaxpr) -> int:
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in open_jaxpr(jaxpr).eqns)


@pytest.mark.cpu_mesh
def test_a_gather_waits_for_the_loop_before_it():
    program, mesh = sharded(headed_loss, HEADED)
    waiting = gather_after_loops(program)
    assert barriers(waiting.jaxpr) == barriers(program.jaxpr) + 1
    assert_same_work(waiting, program, mesh)


@pytest.mark.cpu_mesh
def test_so_does_one_inside_of_another_loop():
    program, mesh = sharded(in_two_iterations(headed_loss), HEADED)
    outer, waiting = (
        next(
            loop
            for loop in find_loops(each.jaxpr)
            if any(inner.path[:1] == loop.path for inner in find_loops(each.jaxpr) if len(inner.path) == 2)
            and len(loop.path) == 1
        )
        for each in (program, gather_after_loops(program))
    )
    assert barriers(waiting.eqn.params["jaxpr"]) == barriers(outer.eqn.params["jaxpr"]) + 1
    assert_same_work(gather_after_loops(program), program, mesh)


@pytest.mark.pure
def test_what_was_gathered_before_the_loop_does_not_wait():
    program, _ = sharded(footed_loss, FOOTED)
    assert gather_after_loops(program) is program


@pytest.mark.cpu_mesh
def test_gathers_of_the_same_wait_alike():
    """XLA merges the gather of the head for forward with that for backward, as both wait in the same way."""
    program, mesh = sharded(
        lambda params, batch: headed_loss(params, jnp.sin(batch)) + headed_loss(params, batch), HEADED
    )
    waiting = gather_after_loops(program)
    operands = [eqn.invars[0] for eqn in open_jaxpr(waiting.jaxpr).eqns if eqn.primitive.name == "all_gather"]
    before = [eqn.invars[0] for eqn in open_jaxpr(program.jaxpr).eqns if eqn.primitive.name == "all_gather"]
    assert len(set(operands)) == len(set(before))
    assert_same_work(waiting, program, mesh)


@pytest.mark.pure
def test_nothing_waits_for_a_loop_that_does_not_communicate():
    program, _ = sharded(idle_loop_loss, IDLE)
    assert gather_after_loops(program) is program


@pytest.mark.h100_aot
def test_the_gather_starts_after_the_loop():
    program, mesh = sharded_under_a_head()
    compiled = lower(gather_after_loops(program), mesh, "cuda").compile(compiler_options=compile_options("cuda"))
    opcodes = [each.opcode for each in read(compiled.as_text() or "").entry.instructions]
    forward = opcodes.index("while")
    assert not any(opcode.startswith("all-gather") for opcode in opcodes[:forward])
    assert any(opcode.startswith("all-gather") for opcode in opcodes[forward:])
