"""Loops wait for the reductions before them, and for nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.lowering.compile import compile_options
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.lowering.hlo import read
from jax_deepcompile.passes.reduce_before_loops import reduce_before_loops
from tests.partition.steps import shapes, training_step
from tests.passes.programs import WIDTH, count, run, run_stack, sharded, stack_loss, stack_shapes

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
    def loss(params, batch):
        y = jnp.tanh(batch @ params["w"])
        return jnp.mean(jax.lax.scan(lambda x, _: (jnp.sin(x), None), y, None, length=3)[0] @ params["head"])

    program, _ = sharded(loss, {"w": (WIDTH, WIDTH), "head": (WIDTH, WIDTH)})
    assert reduce_before_loops(program) is program


@pytest.mark.h100_aot
def test_the_reduction_ends_before_the_loop():
    width = 1024
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))

    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.mean((jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0] @ params["head"]) ** 2)

    params, optimizer = shapes({"w": (6, width, width), "head": (width, 8 * width)}), optax.sgd(0.1)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    step = deepcompile.shard(training_step(loss, optimizer), mesh, passes=())
    program = reduce_before_loops(step.trace(state, shapes((64, width))).sharded)
    compiled = lower(program, mesh, "cuda").compile(compiler_options=compile_options("cuda"))
    order = list(read(compiled.as_text() or "").entry.instructions)
    backward = max(index for index, each in enumerate(order) if each.opcode == "while")
    reductions = [
        index
        for index, each in enumerate(order)
        if each.opcode in ("reduce-scatter", "reduce-scatter-done") and index < backward
    ]
    assert reductions
