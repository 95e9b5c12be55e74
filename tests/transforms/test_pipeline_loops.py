"""Pipelined loops compute the same bits, and communicate as often, an iteration earlier or later."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint
from jax.extend.core import Var

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from tests.cases import in_turn
from tests.transforms.programs import (
    LAYERS,
    MATRICES,
    STACK,
    WIDTH,
    assert_same_values,
    backwards_loss,
    count,
    deeper_schedules,
    layer,
    matrices_loss,
    outline,
    plain_loss,
    run_stack,
    sharded,
    stack_loss,
    stack_shapes,
    two_stacks_loss,
)


def assert_same(program, mesh, schedules):
    planned = LoopSchedule.apply(program, mesh, schedules)
    assert_same_values(planned, program, mesh)
    return planned


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("ahead", "behind"), [(1, 1), (2, 1), (1, 2), (3, 3), (1, 0), (0, 1)])
def test_values_and_counts_stay_the_same_at_every_depth(ahead, behind):
    program, mesh = sharded(stack_loss, STACK)
    planned = assert_same(program, mesh, deeper_schedules(program, ahead, behind))
    for primitive in ("all_gather", "reduce_scatter", "psum"):
        assert count(planned, primitive) == count(program, primitive)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("layers", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_short_loops(layers):
    program, mesh = sharded(stack_loss, {"stack": stack_shapes(layers)})
    schedules = choose_schedules(program)
    assert bool(schedules) == (layers > 1)
    assert_same(program, mesh, schedules)


@pytest.mark.pure
def test_arrays_written_into_the_program_tell_equations_apart():
    """As the tables of an integrator are, in the loops of ``odeint``."""

    def integrated(params, batch):
        def rate(y, t, params):
            return jnp.tanh(y @ params["w"]) * (1 + t)

        return jnp.mean(odeint(rate, batch, np.linspace(0, 1, 3, dtype=np.float32), params)[-1] ** 2)

    program, _ = sharded(integrated, {"w": (WIDTH, WIDTH)})
    for loop in find_loops(program):
        assert split_body(loop.eqn).main.outputs


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("first", "last"), [(0, 3), (2, 2), (5, 5), (1, 9)])
def test_peeled_iterations(first, last):
    program, mesh = sharded(stack_loss, STACK)
    schedules = [
        dataclasses.replace(schedule, first_layers=first, last_layers=last) for schedule in choose_schedules(program)
    ]
    assert_same(program, mesh, schedules)


def nested(params, batch):
    def group(x, stack):
        return run_stack(stack, x), jnp.sum(x, axis=-1).mean()

    x, means = lax.scan(group, batch, params["groups"])
    return jnp.mean(x**2) + means.sum()


def shared_layer(params, batch):
    def body(x, stack):
        return layer(layer(x, stack), params["shared"]), None

    return jnp.mean(lax.scan(jax.checkpoint(body), batch, params["stack"])[0] ** 2)


ONE = jax.tree.map(lambda shape: shape[1:], stack_shapes(), is_leaf=lambda leaf: isinstance(leaf, tuple))
CASES = {
    "no remat": (plain_loss, STACK),
    "backwards": (backwards_loss, STACK),
    "two stacks": (two_stacks_loss, {"a": stack_shapes(), "b": stack_shapes(3)}),
    "nested": (
        nested,
        {"groups": jax.tree.map(lambda shape: (2, *shape), stack_shapes(), is_leaf=lambda s: isinstance(s, tuple))},
    ),
    "shared layer": (shared_layer, STACK | {"shared": ONE}),
}


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("case", "mesh"),
    in_turn({case: (case,) for case in CASES}, {"8": {"fsdp": 8}, "2x4": {"data": 2, "fsdp": 4}}),
)
def test_loops_of_every_kind(case, mesh):
    loss, params = CASES[case]
    program, mesh = sharded(loss, params, mesh=mesh)
    schedules = choose_schedules(program)
    assert schedules
    assert_same(program, mesh, schedules)


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(matrices_loss, MATRICES)
    gather, product, reduce = "all_gather", "dot_general", "reduce_scatter"
    assert outline(program) == indented("scan 4", gather, product) + indented(
        "scan 4", gather, product, product, reduce, product
    )
    layer = [product] * 3
    forward = [gather, *indented("scan 3", gather, product), product]
    backward = [gather, gather, *layer, *indented("scan 2", gather, *layer, reduce), *layer, reduce, reduce]
    assert outline(LoopSchedule.apply(program, mesh, choose_schedules(program))) == [*forward, *backward]


def indented(loop: str, *body: str) -> list[str]:
    return [loop, *(f"  {line}" for line in body)]


@pytest.mark.pure
def test_a_body_is_split_into_what_comes_early_and_what_comes_late():
    program, _ = sharded(stack_loss, STACK)
    forward, backward = (split_body(loop.eqn) for loop in find_loops(program))
    names = [eqn.primitive.name for eqn in forward.early.jaxpr.eqns]
    assert names.count("all_gather") == 3
    assert not forward.late_outputs
    assert "all_gather" not in [eqn.primitive.name for eqn in backward.main.jaxpr.eqns]
    assert [eqn.primitive.name for eqn in backward.late.jaxpr.eqns].count("reduce_scatter") == 3
    assert len(backward.late_outputs) == 3


@pytest.mark.pure
def test_in_the_loop_a_gradient_waits_for_the_stack_it_will_be_reduced_for():
    program, mesh = sharded(stack_loss, STACK)
    planned = LoopSchedule.apply(program, mesh, choose_schedules(program))
    *_, backward = find_loops(planned)
    body = open_jaxpr(backward.eqn.params["jaxpr"])
    made_by = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    barriers = [eqn for eqn in body.eqns if eqn.primitive.name == "optimization_barrier"]
    waiting = [eqn for eqn in barriers if any(var.aval.shape[:1] == (LAYERS,) for var in eqn.invars)]
    assert sorted(eqn.invars[-1].aval.shape[1:] for eqn in waiting) == [
        (WIDTH // 8, 2 * WIDTH),
        (2 * WIDTH // 8, WIDTH),
    ]
    for barrier in waiting:
        operand, stack = barrier.outvars[0], barrier.outvars[-1]
        assert barrier.invars[-1] in body.invars
        assert {eqn.primitive.name for eqn in body.eqns if operand in eqn.invars} <= {"dot_general", "transpose"}
        (written,) = (eqn for eqn in body.eqns if stack in eqn.invars)
        assert written.params["name"] == "dynamic_update_index_in_dim"
        assert "reduce_scatter" in {eqn.primitive.name for eqn in _before(written, made_by)}


@pytest.mark.pure
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 4, "model": 2}], ids=["all ours", "some automatic"])
def test_gradients_are_carried_in_a_row_unless_xla_divides_them(mesh):
    program, mesh = sharded(stack_loss, STACK, mesh=mesh)
    planned = LoopSchedule.apply(program, mesh, choose_schedules(program))
    *_, backward = find_loops(planned)
    carried = [var.aval.shape for var in open_jaxpr(backward.eqn.params["jaxpr"]).outvars]
    in_a_row = (2 * WIDTH * WIDTH,) in carried
    assert in_a_row == (mesh.axis_names == ("fsdp",))


def _before(eqn, made_by: dict) -> list:
    """``eqn`` and what its operands are made by."""
    found, todo = [], [eqn]
    while todo:
        found.append(todo.pop())
        todo += [made_by[var] for var in found[-1].invars if isinstance(var, Var) and var in made_by]
    return found


def activations_only(params, batch):
    def body(x, _):
        return jnp.tanh(x) * 2.0, None

    return jnp.mean((lax.scan(body, batch, length=4)[0] @ params["w"]) ** 2)


@pytest.mark.pure
def test_loops_that_communicate_nothing_are_left_alone():
    program, mesh = sharded(activations_only, {"w": (WIDTH, WIDTH)})
    assert choose_schedules(program) == ()
    assert LoopSchedule.apply(program, mesh, ()) is program


def gathers_what_the_layer_made(params, batch):
    def body(carry, params):
        x, scale = carry
        return (layer(x * scale.mean(), params), scale * params["bias"][:WIDTH]), None

    (x, scale), _ = lax.scan(body, (batch, jnp.ones(WIDTH)), params["stack"])
    return jnp.mean(x**2) + scale.sum()


@pytest.mark.cpu_mesh
def test_what_depends_on_the_carry_is_not_done_ahead():
    program, mesh = sharded(gathers_what_the_layer_made, STACK)
    assert_same(program, mesh, choose_schedules(program))


@pytest.mark.pure
@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (LoopSchedule("layers", 1, 0, 0, 1), "layers: gathers a layer ahead, runs its last layer apart"),
        (LoopSchedule("layers", 0, 2, 2, 0), "layers: reduces 2 layers behind, runs its first 2 layers apart"),
        (LoopSchedule("layers", 0, 0), "layers: runs as it is, stacks by index"),
    ],
)
def test_a_schedule_reads_in_words(schedule, words):
    assert schedule.describe() == words
