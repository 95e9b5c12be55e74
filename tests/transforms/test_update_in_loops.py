"""State that is updated in the loop that makes its gradients has the same values, in its memory or the host's."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.memory import HOST_KIND, is_fetch, is_offload
from jax_deepcompile.ir.primitives import PRODUCTS
from jax_deepcompile.planner.state_on_host import updatable
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.in_place import succeeded
from jax_deepcompile.transforms.offload_parameters import streamable
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.update_in_loops import LoopUpdate, UpdatedInLoop
from tests.partition.steps import lines, trace
from tests.transforms.programs import (
    MATRICES,
    STACK,
    UNDER_A_HEAD,
    assert_same_values,
    backwards_loss,
    halves_loss,
    matrices_loss,
    matrices_under_a_head_loss,
    outer_loops,
    plain_loss,
    sharded,
    stack_loss,
)

ONE = {"fsdp": 1}


def updates(program, twice: bool = False) -> list[LoopUpdate]:
    return [update for loop in find_loops(program) if (update := LoopUpdate.of(program, loop, twice))]


def moments(update: LoopUpdate) -> tuple[str, ...]:
    return tuple(name for name in update.copyable.values() if {"mu", "nu", "trace", "m"} & set(name.split("/")))


def updated(program, mesh, ahead: int = 0, behind: int = 0, copied: Callable = lambda update: (), **more):
    """``program`` with all updates in loops, that run as a schedule says."""
    decisions = []
    for update in updates(program) or updates(program, twice=True):
        away = copied(update)
        inside = UpdatedInLoop(update.loop.name, away, update.twice)
        decisions += [inside, LoopSchedule(inside.updating, ahead, behind, behind, ahead, **more)]
        decisions += [OffloadedState(away)] * bool(away)
    return carry_out(program, mesh, decisions)


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(matrices_loss, MATRICES, mesh=ONE)
    (update,) = updates(program)
    inside = UpdatedInLoop.apply(program, mesh, [UpdatedInLoop(update.loop.name)])
    stack, layer = "f32[4,16,16]", "f32[16,16]"
    momentum = ["mul f32[] {0} -> {0}", "add {0} {0} -> {0}"]  # and descent, after it
    assert lines(program, ("mul", "add"))[-4:] == [line.format(stack) for line in 2 * momentum]
    assert lines(inside, ("mul", "add"))[-4:] == [f"  {line.format(layer)}" for line in 2 * momentum]
    scan = find_loop(inside, update.loop.name).scan
    assert [var.aval.shape for var in scan.results.ys] == [(4, 16, 16)] * 2, "parameters and momentum, no gradients"


@pytest.mark.pure
def test_before_and_after_where_the_loop_runs_twice():
    program, mesh = sharded(matrices_loss, MATRICES, mesh=ONE, optimizer=OPTIMIZERS["clipped"])
    (update,) = updates(program, twice=True)
    inside = UpdatedInLoop(update.loop.name, twice=True)
    twice = UpdatedInLoop.apply(program, mesh, [inside])
    assert [loop.name for loop in find_loops(twice)] == ["w @forward", "w @backward", "w @update"]
    backward, second = (find_loop(twice, name) for name in (update.loop.name, inside.updating))
    assert lines(twice, ("reduce_sum",))[-2:] == ["  reduce_sum f32[16,16] -> f32[]", "reduce_sum f32[4] -> f32[]"]
    assert lines(program, ("reduce_sum",))[-1:] == ["reduce_sum f32[4,16,16] -> f32[]"]
    assert [var.aval.shape for var in backward.scan.results.ys] == [(4,)], "squares of each layer"
    assert [var.aval.shape for var in second.scan.results.ys] == [(4, 16, 16)] * 3, "parameters and moments"
    assert [sum(eqn.primitive.name in PRODUCTS for eqn in loop.body.eqns) for loop in (backward, second)] == [3, 3]


def find_loop(program, name):
    return next(loop for loop in find_loops(program) if loop.name == name)


OPTIMIZERS = {
    "descent": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-2, eps=1e-3),
    "narrow": optax.adamw(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16),
    "schedule": optax.adam(optax.cosine_decay_schedule(1e-2, 10), eps=1e-3),
    "lion": optax.lion(1e-3),
    "comparisons": optax.adagrad(1e-2),
    "by element": optax.chain(optax.clip(0.1), optax.adam(1e-2, eps=1e-3)),
    "clipped": optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2, eps=1e-3)),
    "clipped by block": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1, momentum=0.9)),
}
LOSSES = {
    "stack": (stack_loss, STACK),
    "kept": (plain_loss, STACK),
    "backwards": (backwards_loss, STACK),
    "under a head": (matrices_under_a_head_loss, UNDER_A_HEAD),
}


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_values_stay_the_same(optimizer):
    program, mesh = sharded(matrices_loss, MATRICES, mesh=ONE, optimizer=optimizer)
    assert updates(program) or updates(program, twice=True)
    assert_same_values(updated(program, mesh), program, mesh)


@pytest.mark.cpu_mesh
@settings(deadline=None, max_examples=12)
@given(
    devices=st.sampled_from([1, 8]),
    case=st.sampled_from(sorted(LOSSES)),
    optimizer=st.sampled_from(["momentum", "adamw", "clipped"]),
    ahead=st.integers(0, 2),
    behind=st.integers(0, 2),
    away=st.booleans(),
)
def test_however_the_loop_runs_and_wherever_moments_are(devices, case, optimizer, ahead, behind, away):
    loss, params = LOSSES[case]
    program, mesh = sharded(loss, params, mesh={"fsdp": devices}, optimizer=OPTIMIZERS[optimizer])
    planned = updated(program, mesh, ahead, behind, moments if away else lambda update: ())
    assert_same_values(planned, program, mesh)


@pytest.mark.pure
def test_what_is_on_the_host_is_copied_by_layer_and_stays_there():
    program, mesh = sharded(stack_loss, STACK, mesh=ONE, optimizer=OPTIMIZERS["adamw"])
    (update,) = updates(program)
    names = moments(update)
    decisions = [UpdatedInLoop(update.loop.name, names), OffloadedState(names)]
    there = carry_out(program, mesh, decisions)
    kinds = [(there.inputs[before], there.outputs[after]) for before, after in program.state_outputs]
    assert sum(before.memory_kind == after.memory_kind == HOST_KIND for before, after in kinds) == len(names) == 6
    body = find_loop(there, update.loop.name).body
    assert (sum(map(is_fetch, body.eqns)), sum(map(is_offload, body.eqns))) == (6, 6)
    outside = open_jaxpr(there.jaxpr).eqns
    assert not any(is_fetch(eqn) or is_offload(eqn) for eqn in outside)


@pytest.mark.pure
def test_every_stack_of_the_state_is_written_in_place():
    program, mesh = sharded(stack_loss, STACK, mesh=ONE, optimizer=OPTIMIZERS["adamw"])
    (update,) = updates(program)
    inside = UpdatedInLoop.apply(program, mesh, [UpdatedInLoop(update.loop.name)])
    assert len(succeeded(inside, find_loop(inside, update.loop.name))) == 9
    assert not streamable(inside), "layers that a loop updates cannot be copied by it as well"
    assert streamable(program)


def _clipped(g):
    return optax.clip_by_global_norm(0.01).update(g, optax.EmptyState())[0]


def stepping(change: Callable, extra: Callable = lambda state, g, m: (), devices: int = 1):
    """A step whose gradients go through ``change`` before momentum, and that returns ``extra`` of all."""

    def step(state, batch):
        loss, g = jax.value_and_grad(matrices_loss)(state["p"], batch)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], change(g))
        return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], m), "m": m}, (loss, extra(state, g, m))

    traced = trace(step, {"p": MATRICES, "m": MATRICES}, (16, 16), {"fsdp": devices}, state_argnums=0)
    return traced.sharded, traced.compilation.context.use.mesh


OF_ALL = {
    "a norm of all gradients": _clipped,
    "a norm of one stack": lambda g: jax.tree.map(lambda g: g / jnp.linalg.norm(g), g),
    "the largest": lambda g: jax.tree.map(lambda g: g / jnp.abs(g).max(), g),
    "a loss scale that is made of gradients": lambda g: jax.tree.map(
        lambda g: jnp.where(jnp.isfinite(g).all(), g, 0), g
    ),
    "an element": lambda g: jax.tree.map(lambda g: g - g[1, 0, 0], g),
}
OF_OTHERS = {
    "other layers": lambda g: jax.tree.map(lambda g: g - g[::-1], g),
    "a running sum": lambda g: jax.tree.map(lambda g: jnp.cumsum(g, 0), g),
    "a norm of each layer": lambda g: jax.tree.map(lambda g: g / jnp.linalg.norm(g, axis=(1, 2), keepdims=True), g),
}


@pytest.mark.pure
@pytest.mark.parametrize("change", [*OF_ALL.values(), *OF_OTHERS.values()], ids=[*OF_ALL, *OF_OTHERS])
def test_what_reads_other_layers_is_updated_after_them(change):
    program, mesh = stepping(change)
    assert not updates(program)
    (loop,) = [loop for loop in outer_loops(program) if loop.reverse]
    with pytest.raises(errors.PlanError, match="nothing of the state can be updated"):
        UpdatedInLoop.apply(program, mesh, [UpdatedInLoop(loop.name)])


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("change", OF_ALL.values(), ids=OF_ALL)
def test_scalars_of_all_layers_are_there_in_a_second_run(change, devices):
    program, mesh = stepping(change, devices=devices)
    (update,) = updates(program, twice=True)
    assert len(update.reductions) == (change is not OF_ALL["an element"])
    assert_same_values(updated(program, mesh, 1, 1, moments), program, mesh)


@pytest.mark.pure
@pytest.mark.parametrize("change", [lambda g: g, *OF_OTHERS.values()], ids=["nothing", *OF_OTHERS])
def test_what_a_second_run_does_not_help_has_none(change):
    program, mesh = stepping(change)
    (loop,) = [loop for loop in outer_loops(program) if loop.reverse]
    with pytest.raises(errors.PlanError, match="nothing of the state can be updated in 'p @backward' by a second run"):
        UpdatedInLoop.apply(program, mesh, [UpdatedInLoop(loop.name, twice=True)])


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    "extra",
    [lambda state, g, m: g, lambda state, g, m: optax.tree.norm(g), lambda state, g, m: optax.tree.norm(state["p"])],
    ids=["gradients", "their norm", "the norm of parameters"],
)
def test_what_else_reads_the_same_has_it(extra):
    program, mesh = stepping(lambda g: g, extra)
    assert updates(program)
    assert_same_values(updated(program, mesh), program, mesh)


OTHERS = {
    "a constant": lambda state, g, m: 0.0,
    "the norm of new moments": lambda state, g, m: optax.tree.norm(m),
    "a row of new moments": lambda state, g, m: m["w"][0],
    "old moments": lambda state, g, m: state["m"],
    "what the update is made of": lambda state, g, m: jnp.sum(0.1 * m["w"]),
}


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("extra", OTHERS.values(), ids=OTHERS)
def test_what_else_reads_state_keeps_it_on_the_device(extra):
    program, mesh = stepping(lambda g: g, extra)
    (update,) = updates(program)
    assert len(moments(update)) == (extra is OTHERS["a constant"])
    assert_same_values(updated(program, mesh, 1, 1, moments), program, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("devices", [1, 8])
def test_of_two_loops_the_last_updates_what_both_make_gradients_of(devices):
    def siamese(params, batch):
        return matrices_loss(params, batch) + matrices_loss(params, 2 * batch)

    program, mesh = sharded(siamese, MATRICES, mesh={"fsdp": devices})
    found = updatable(program, mesh)
    assert len(found) == 1 < len(updates(program))
    assert_same_values(carry_out(program, mesh, found), program, mesh)


@pytest.mark.pure
def test_loops_in_loops_update_nothing():
    program, _ = sharded(halves_loss, STACK, mesh=ONE)
    assert not updates(program)


@pytest.mark.pure
def test_layers_in_another_order_update_nothing():
    def step(state, batch):
        g = jax.grad(lambda p: jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, p[::-1])[0] ** 2))
        return {"p": state["p"] - 0.1 * g(state["p"])}, 0.0

    program = trace(step, {"p": (4, 16, 16)}, (16, 16), ONE, state_argnums=0).sharded
    assert not updates(program)


@pytest.mark.pure
def test_names_that_are_not_there_are_refused():
    program, mesh = sharded(matrices_loss, MATRICES, mesh=ONE)
    (update,) = updates(program)
    with pytest.raises(errors.PlanError, match="nearest names"):
        UpdatedInLoop.apply(program, mesh, [UpdatedInLoop("layers")])
    with pytest.raises(errors.PlanError, match=r"'w', of which there is none there; the nearest names"):
        UpdatedInLoop.apply(program, mesh, [UpdatedInLoop(update.loop.name, ("w",))])
