"""Loops wait for the reductions before them, and for nothing else."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.lowering.compile import compile_options
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.lowering.hlo import read
from jax_deepcompile.passes.reduce_before_loops import reduce_before_loops
from tests.passes.programs import (
    IDLE,
    WIDTH,
    count,
    idle_loop_loss,
    run,
    run_stack,
    sharded,
    sharded_under_a_head,
    stack_loss,
    stack_shapes,
)

HEADED = {"stack": stack_shapes(), "head": (WIDTH, 8 * WIDTH)}


def headed_loss(params, batch):
    """Layers under a head: its gradient is ready before the layers' backward pass."""
    return jnp.mean((run_stack(params["stack"], batch) @ params["head"]) ** 2)


def footed_loss(params, batch):
    """The same layer before them: its gradient is ready only after them."""
    return jnp.mean(run_stack(params["stack"], batch @ params["foot"]) ** 2)


def barriers(program) -> int:
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in open_jaxpr(program.jaxpr).eqns)


@pytest.mark.cpu_mesh
def test_values_stay_the_same():
    program, mesh = sharded(headed_loss, HEADED)
    waiting = reduce_before_loops(program)
    verify(waiting)
    assert barriers(waiting) == barriers(program) + 1
    for name in ("all_gather", "reduce_scatter", "dot_general"):
        assert count(waiting, name) == count(program, name)
    for got, expected in zip(run(waiting, mesh), run(program, mesh), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.pure
@pytest.mark.parametrize(
    ("loss", "params"),
    [(stack_loss, {"stack": stack_shapes()}), (footed_loss, {"stack": stack_shapes(), "foot": (WIDTH, WIDTH)})],
    ids=["nothing before", "only after"],
)
def test_loops_that_nothing_is_reduced_before_do_not_wait(loss, params):
    program, _ = sharded(loss, params)
    assert reduce_before_loops(program) is program


@pytest.mark.pure
def test_a_loop_that_does_not_communicate_does_not_wait():
    program, _ = sharded(idle_loop_loss, IDLE)
    assert reduce_before_loops(program) is program


@pytest.mark.h100_aot
def test_the_reduction_ends_before_the_loop():
    program, mesh = sharded_under_a_head()
    compiled = lower(reduce_before_loops(program), mesh, "cuda").compile(compiler_options=compile_options("cuda"))
    order = list(read(compiled.as_text() or "").entry.instructions)
    backward = max(index for index, each in enumerate(order) if each.opcode == "while")
    reductions = [
        index
        for index, each in enumerate(order)
        if each.opcode in ("reduce-scatter", "reduce-scatter-done") and index < backward
    ]
    assert reductions
