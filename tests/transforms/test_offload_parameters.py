"""Parameters on the host come to layer loops a layer at a time, and to their update: the same bits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.ir.memory import HOST_KIND, is_fetch, is_offload, is_on_host
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.verifier import verify
from jax_deepcompile.planner.layers import copying_ahead
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.offload_parameters import OffloadedParameters, reads, sliced_by, streamable
from jax_deepcompile.transforms.offload_state import OffloadedState, movable
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from tests.cases import in_turn
from tests.partition.steps import lines
from tests.transforms.programs import (
    BATCH,
    GROUPS,
    MATRICES,
    STACK,
    WIDTH,
    assert_same_values,
    groups_loss,
    matrices_loss,
    shapes,
    sharded,
    stack_loss,
    stack_shapes,
    two_stacks_loss,
)

CLIPPED = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1, momentum=0.9))


def decayed_loss(params, batch):
    """What loops read is read whole, too."""
    return matrices_loss(params, batch) + 0.01 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


CASES: dict[str, tuple[Callable, dict, dict]] = {
    "stack": (stack_loss, STACK, {}),
    "clipped": (stack_loss, STACK, {"optimizer": CLIPPED}),
    "two stacks": (two_stacks_loss, {"a": stack_shapes(3), "b": stack_shapes()}, {}),
    "loop in a loop": (groups_loss, GROUPS, {}),
    "read whole, too": (decayed_loss, MATRICES, {"optimizer": CLIPPED}),
    "microbatches": (stack_loss, STACK, {"microbatches": 2, "optimizer": CLIPPED}),
}


def away(program: Program) -> OffloadedParameters:
    return OffloadedParameters(tuple(streamable(program).values()))


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(matrices_loss, MATRICES)
    after = carry_out(program, mesh, [away(program)])
    (before_loop, *_), (loop, *_) = (
        [eqn for eqn in open_jaxpr(each.jaxpr).eqns if eqn.primitive.name == "scan"] for each in (program, after)
    )
    plain = [eqn.primitive.name for eqn in open_jaxpr(before_loop.params["jaxpr"]).eqns]
    assert [eqn.primitive.name for eqn in open_jaxpr(loop.params["jaxpr"]).eqns] == ["device_put", *plain]
    kept, made = lines(program)[-2:]
    stack = made.rpartition(" -> ")[2]
    assert lines(after)[-4:] == [
        kept,
        f"device_put {stack.replace('f32', 'f32<host>')} -> {stack}",
        made,
        f"device_put {stack} -> {stack.replace('f32', 'f32<host>')}",
    ]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("case", "how"),
    in_turn(
        {case: (case,) for case in CASES},
        {each: each for each in ("plain", "updated as they come", "updated by layer")},
    ),
)
def test_values_stay_the_same(case, how, monkeypatch):
    monkeypatch.setattr("jax_deepcompile.transforms.stack_updates._LAYER_BYTES", 1)
    loss, params, options = CASES[case]
    program, mesh = sharded(loss, params, **options)
    plan = Plan("0", (away(program),))
    if how != "plain":
        plan = copying_ahead(plan, program, mesh)
        assert plan.of(LoopSchedule)
    if how.startswith("updated"):
        leaves = tuple(movable(program).values())
        plan = plan.having(OffloadedState, [OffloadedState(leaves, by_layer=how.endswith("layer"))])
    planned = plan.program(program, mesh)
    verify(planned)
    there = {port.path for port in planned.inputs if port.memory_kind == HOST_KIND}
    named = {program.inputs[place].path for place in (movable if how.startswith("updated") else streamable)(program)}
    assert there == named
    assert_same_values(planned, program, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("case", ["stack", "two stacks", "loop in a loop", "read whole, too"])
def test_values_of_an_evaluation_stay_the_same(case):
    loss, params, _ = CASES[case]
    step = deepcompile.shard(loss, {"fsdp": 8})
    program, mesh = step.trace(shapes(params), shapes((BATCH, WIDTH))).sharded, step.mesh
    leaves = tuple(streamable(program).values())
    assert leaves
    plan = copying_ahead(Plan("0", (OffloadedParameters(leaves), OffloadedState(leaves))), program, mesh)
    planned = plan.program(program, mesh)
    verify(planned)
    assert [port.path for port in planned.inputs if port.memory_kind == HOST_KIND]
    assert all(port.memory_kind != HOST_KIND for port in planned.outputs)
    assert_same_values(planned, program, mesh)


@pytest.mark.pure
def test_state_that_is_kept_stays():
    program, _ = sharded(stack_loss, STACK)
    assert not movable(program.replace(state_outputs=()))


@pytest.mark.pure
def test_a_pipelined_loop_copies_a_layer_ahead():
    program, mesh = sharded(stack_loss, STACK)
    streamed = carry_out(program, mesh, [away(program)])
    for loop in find_loops(streamed):
        assert sum(map(is_fetch, split_body(loop.eqn).early.jaxpr.eqns)) == len(STACK["stack"])


@pytest.mark.pure
def test_whole_leaves_are_copied_once_and_not_before_their_update():
    program, mesh = sharded(stack_loss, STACK, optimizer=CLIPPED)
    streamed = carry_out(program, mesh, [away(program)])
    eqns = open_jaxpr(streamed.jaxpr).eqns
    assert sum(map(is_fetch, eqns)) == sum(map(is_offload, eqns)) == len(STACK["stack"])
    first, last = ([at for at, eqn in enumerate(eqns) if found(eqn)] for found in (is_fetch, _reads_host_in_a_loop))
    assert min(first) > max(last)


def _reads_host_in_a_loop(eqn) -> bool:
    return eqn.primitive.name == "scan" and any(map(is_on_host, eqn.invars))


@pytest.mark.pure
def test_how_often_layers_are_read():
    assert set(reads(sharded(stack_loss, STACK)[0]).values()) == {2}
    assert set(reads(sharded(stack_loss, STACK, microbatches=2)[0]).values()) == {4}


@pytest.mark.pure
def test_what_a_loop_reads_otherwise_stays():
    def carried(w, x):
        return lax.scan(lambda c, _: ((jnp.tanh(c[0] @ c[1][0]), c[1]), None), (x, w), length=2)[0][0]

    def whole(w, x):
        return lax.scan(lambda x, layer: (jnp.tanh(x @ layer) + jnp.sum(w), None), x, w)[0]

    def by_layer(w, x):
        return lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)[0] + jnp.sum(w)

    for function, loops in ((carried, 0), (whole, 0), (by_layer, 1)):
        jaxpr = jax.make_jaxpr(function)(jnp.ones((2, 4, 4)), jnp.ones((4, 4)))
        var = open_jaxpr(jaxpr).invars[0]
        assert sliced_by(jaxpr, [var]) == {var: loops}


@pytest.mark.pure
def test_what_is_no_stack_of_layers_stays():
    program, _ = sharded(lambda params, x: jnp.mean((x @ params["w"][0]) ** 2), MATRICES)
    assert not streamable(program)
