"""Backward that waits for gradients of parameters: the same bits, computed as often, and less held."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import slim_barriers
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.gradients_in_turn import GradientsInTurn, bodies_with_gradients
from jax_deepcompile.transforms.rematerialize_segments import segments_of
from tests.cases import examples
from tests.partition.steps import lines
from tests.transforms.programs import (
    LAYERS,
    STACK,
    WIDTH,
    assert_same_work,
    compiled_for_h100s,
    count,
    h100s,
    in_two_iterations,
    sharded,
    stack_loss,
)
from tests.transforms.test_prefetch import CHAIN, chain_loss

KERNELS = {f"layer{index}": (3, 3, WIDTH, WIDTH) for index in range(LAYERS)}


def in_turn(program, mesh, waiting_bytes=0, where=""):
    return carry_out(program, mesh, [GradientsInTurn(where, waiting_bytes)])


def convolved_loss(params, batch):
    for kernel in params.values():
        batch = jax.nn.relu(
            jax.lax.conv_general_dilated(batch, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return jnp.mean(batch**2)


def squared_loss(params, batch):
    for kernel in params.values():
        batch = jnp.sin(batch @ kernel)
    return jnp.mean(batch)


def with_biases_loss(params, batch):
    for place in range(LAYERS):
        up, bias, down = (params["stack"][name][place] for name in ("up", "bias", "down"))
        batch = batch + jnp.tanh(batch @ up + bias) @ down
    return jnp.mean(batch**2)


BACKWARD = """
dot_general f32[2,16] f32[2,16] -> f32[16,16]
dot_general f32[2,16] f32[16,16] -> f32[2,16]
dot_general f32[2,16] f32[2,16] -> f32[16,16]
dot_general f32[2,16] f32[16,16] -> f32[2,16]
dot_general f32[2,16] f32[2,16] -> f32[16,16]
"""

IN_TURN = """
dot_general f32[2,16] f32[2,16] -> f32[16,16]
optimization_barrier f32[2,16] f32[16,16] -> f32[2,16] f32[16,16]
dot_general f32[2,16] f32[16,16] -> f32[2,16]
dot_general f32[2,16] f32[2,16] -> f32[16,16]
optimization_barrier f32[2,16] f32[16,16] -> f32[2,16] f32[16,16]
dot_general f32[2,16] f32[16,16] -> f32[2,16]
dot_general f32[2,16] f32[2,16] -> f32[16,16]
"""


def test_the_next_product_of_backward_waits():
    program, mesh = sharded(squared_loss, dict.fromkeys("abc", (WIDTH, WIDTH)))
    forward = ["dot_general f32[2,16] f32[16,16] -> f32[2,16]"] * 3
    again = "optimization_barrier f32[2,16] f32[2,16] -> f32[2,16] f32[2,16]"  # of gathers, for backward

    def shown(program):
        return [line for line in lines(program, ("dot_general", "optimization_barrier")) if line != again]

    assert shown(program) == forward + BACKWARD.strip().splitlines()
    assert shown(in_turn(program, mesh)) == forward + IN_TURN.strip().splitlines()


@pytest.mark.cpu_mesh
@given(st.sampled_from([0, 1, 1 << 10, 1 << 12, 1 << 14]), st.booleans())
@examples(8)
def test_the_same_values(waiting_bytes, again):
    program, mesh = sharded(with_biases_loss, STACK)
    if again:
        program = carry_out(program, mesh, [next(segments_of(program))[0]])
    planned = in_turn(program, mesh, waiting_bytes)
    assert all_is_read(planned)
    assert_same_work(planned, program, mesh)


def all_is_read(program) -> bool:
    """Whether nothing of a barrier of more than two is left out for not being read, as XLA leaves it out."""
    jaxpr = open_jaxpr(program.jaxpr)
    slim = slim_barriers(jaxpr.eqns, jaxpr.outvars)
    return [len(each.invars) for each in slim] == [len(each.invars) for each in jaxpr.eqns]


@pytest.mark.cpu_mesh
def test_convolutions():
    program, mesh = sharded(convolved_loss, KERNELS, (8, 6, 6, WIDTH))
    assert_same_work(in_turn(program, mesh), program, mesh)


@pytest.mark.cpu_mesh
def test_backward_that_tells_of_itself():
    """What returns nothing is no gradient."""

    @jax.custom_vjp
    def told(x):
        return x

    def backward(_, cotangent):
        jax.debug.callback(lambda value: None, cotangent)
        return (cotangent,)

    told.defvjp(lambda x: (x, None), backward)

    def loss(params, batch):
        for kernel in params.values():
            batch = told(jnp.tanh(batch @ kernel))
        return jnp.mean(batch**2)

    program, mesh = sharded(loss, CHAIN)
    assert_same_work(in_turn(program, mesh), program, mesh)


@pytest.mark.cpu_mesh
def test_in_the_iterations_of_a_loop():
    program, mesh = sharded(in_two_iterations(with_biases_loss), STACK)
    (where,) = bodies_with_gradients(program)
    planned = in_turn(program, mesh, where=where)
    assert count(planned, "optimization_barrier") == count(program, "optimization_barrier") + 2 * (2 * LAYERS - 1)
    assert_same_work(planned, program, mesh)


@pytest.mark.pure
def test_what_may_be_held_decides_how_often_backward_waits():
    program, mesh = sharded(with_biases_loss, STACK)

    def waits(waiting_bytes):
        return count(in_turn(program, mesh, waiting_bytes), "optimization_barrier") - count(
            program, "optimization_barrier"
        )

    assert waits(0) == 2 * LAYERS - 1
    assert waits(1 << 30) == 0
    assert sorted(map(waits, range(0, 4096, 256)), reverse=True) == list(map(waits, range(0, 4096, 256)))
    assert open_jaxpr(in_turn(program, mesh, 1 << 30).jaxpr).eqns == open_jaxpr(program.jaxpr).eqns


@pytest.mark.pure
@pytest.mark.parametrize("loss", [stack_loss, lambda params, batch: jnp.mean((batch @ params["stack"]["up"][0]) ** 2)])
def test_where_no_layer_waits_for_another(loss):
    program, _ = sharded(loss, STACK)
    assert list(bodies_with_gradients(program)) == []


@pytest.mark.pure
def test_bytes_below_zero():
    program, mesh = sharded(chain_loss, CHAIN)
    with pytest.raises(errors.PlanError, match="gradients wait with -1 bytes"):
        in_turn(program, mesh, -1)
    with pytest.raises(errors.PlanError, match="has gradients wait in 'layer', a loop that"):
        in_turn(program, mesh, where="layer")


@pytest.mark.h100_aot
def test_compiled_it_takes_less_memory():
    """What a layer computes again, and what came to it, is gone when the next layer's turn comes."""
    wide = {"up": (LAYERS, 512, 2048), "bias": (LAYERS, 2048), "down": (LAYERS, 2048, 512)}
    program, mesh = sharded(with_biases_loss, {"stack": wide}, (1 << 17, 512), h100s())
    for each in (program, carry_out(program, mesh, [next(segments_of(program))[0]])):
        before, after = (
            compiled_for_h100s(one, mesh).memory_analysis().temp_size_in_bytes for one in (each, in_turn(each, mesh))
        )
        assert after < 0.8 * before
