"""What stays gathered: the same bits, fewer gathers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.analysis.gathers import hoistable_gathers
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.lowering.compile import peak_bytes
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.decision import replace_loops
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names
from jax_deepcompile.transforms.microbatch_loops import hidden_trip_count
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.unshard import ReusedGathers, repeated_gathers
from tests.partition.steps import shapes
from tests.planner.situations import UNROLLED, unrolled_loss
from tests.schedules import gathers, loop_bodies
from tests.transforms.programs import (
    BATCH,
    UNDER_A_HEAD,
    WIDTH,
    assert_same_values,
    compiled_for_h100s,
    count,
    h100s,
    keeping_gathered,
    matrices_under_a_head_loss,
    outline,
    sharded,
    stack_loss,
    stack_shapes,
)

MICROBATCHES = 4


def accumulating(loss, params):
    """A step whose user accumulates gradients in a loop over microbatches."""
    optimizer = optax.sgd(0.1)

    def step(state, batches):
        def one(total, batch):
            value, gradients = jax.value_and_grad(loss)(state["params"], batch)
            return jax.tree.map(jnp.add, total, gradients), value

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        gradients, values = lax.scan(one, zeros, batches.reshape(BATCH, MICROBATCHES, WIDTH).swapaxes(0, 1))
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, values.mean()

    params = shapes(params)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    sharded_step = deepcompile.shard(step, {"fsdp": 8})
    traced = sharded_step.trace(state, shapes((BATCH * MICROBATCHES, WIDTH)))
    return traced.sharded, sharded_step.mesh


def chain_loss(params, x):
    for name in sorted(params):
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, params[name])
    return jnp.mean(x**2)


def until_backward(program, mesh, again):
    """``program`` with what ``again`` chooses of its repeated gathers gathered once."""
    return carry_out(program, mesh, [ReusedGathers(tuple(repeated_gathers(program))[again])])


ALL, FIRST = slice(None), slice(1)
CHAIN = {"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH)}


@pytest.mark.cpu_mesh
def test_straight_line_parameters_stay_gathered_until_the_backward():
    program, mesh = sharded(unrolled_loss, UNROLLED)
    repeated = repeated_gathers(program)
    assert repeated
    planned = until_backward(program, mesh, ALL)
    assert count(planned, "all_gather") == count(program, "all_gather") - len(repeated)
    assert_same_values(planned, program, mesh)


@pytest.mark.cpu_mesh
def test_only_the_chosen_stay():
    program, mesh = sharded(unrolled_loss, UNROLLED)
    planned = until_backward(program, mesh, FIRST)
    assert count(planned, "all_gather") == count(program, "all_gather") - 1
    assert_same_values(planned, program, mesh)


@pytest.mark.pure
def test_a_straight_line_before_and_after():
    program, mesh = sharded(chain_loss, CHAIN)
    forward = ["all_gather", "dot_general"] * 2
    last, first = ["dot_general", "dot_general", "reduce_scatter", "dot_general"], ["dot_general", "dot_general"]
    gather, reduce = ["all_gather"], ["reduce_scatter"]
    assert outline(program) == [*forward, *gather, *last, *gather, *first, *reduce]
    assert outline(until_backward(program, mesh, FIRST)) == [*forward, *last, *gather, *first, *reduce]
    assert outline(until_backward(program, mesh, ALL)) == [*forward, *last, *first, *reduce]
    assert list(repeated_gathers(program)) == ["w1 @backward", "w0 @backward"]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("gathers", "why"),
    [
        (("w0 @forward",), "'w0 @forward', of which there is none there; the nearest names: 'w0 @backward'"),
        (("w0 @backward", "w0 @backward"), "keeps gathered until used again 'w0 @backward' twice"),
    ],
    ids=["not repeated", "twice"],
)
def test_only_repeated_gathers_stay_gathered(gathers, why):
    program, mesh = sharded(chain_loss, CHAIN)
    with pytest.raises(errors.PlanError, match=why):
        carry_out(program, mesh, [ReusedGathers(gathers)])


@pytest.mark.pure
def test_a_loop_over_microbatches_before_and_after():
    program, mesh = sharded(matrices_under_a_head_loss, UNDER_A_HEAD, (4 * BATCH, WIDTH), microbatches=4)
    layers = ["  scan 4", "    all_gather", "    dot_general"]
    head = ["  dot_general", "  dot_general", "  reduce_scatter", "  dot_general"]
    backward = [*layers, "    dot_general", "    reduce_scatter", "    dot_general"]
    assert outline(program) == ["scan 4", *layers, "  all_gather", *head, *backward]
    kept = carry_out(program, mesh, [KeptGathers("microbatches", ("head @forward",))])
    assert outline(kept) == ["all_gather", "scan 4", *layers, *head, *backward]


@pytest.mark.cpu_mesh
def test_a_loop_in_another_keeps_its_own():
    """Chunks of a loss under ``jax.checkpoint``, in every microbatch."""

    def loss(params, batch):
        @jax.checkpoint
        def one(total, chunk):
            return total + jnp.sum(jnp.tanh(jnp.tanh(chunk @ params["up"]) @ params["down"]) ** 2), None

        return lax.scan(one, 0.0, jnp.stack([batch, batch * 2], 1).swapaxes(0, 1))[0]

    sizes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    program, mesh = sharded(loss, sizes, (4 * BATCH, WIDTH), microbatches=2)
    found = {loop.name: hoistable_names(program, loop) for loop in find_loops(program)}
    decisions = [KeptGathers(name, tuple(names)) for name, names in found.items() if names]
    assert len(decisions) > 1
    alone = [count(program, "all_gather") - count(carry_out(program, mesh, [each]), "all_gather") for each in decisions]
    kept = carry_out(program, mesh, decisions)
    assert count(program, "all_gather") - count(kept, "all_gather") == sum(alone)
    assert_same_values(kept, program, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_layers_stay_gathered_over_all_microbatches(layers):
    program, mesh = accumulating(stack_loss, {"stack": stack_shapes()})
    schedules = [
        dataclasses.replace(
            schedule,
            last_layers=layers + 1 if not schedule.delay_layers else schedule.last_layers,
            first_layers=max(layers, 1) if schedule.delay_layers else 0,
        )
        for schedule in choose_schedules(program)
    ]
    pipelined = LoopSchedule.apply(program, mesh, schedules)
    planned = keeping_gathered(pipelined, mesh)
    before, after = count(program, "all_gather"), count(planned, "all_gather")
    kept_leaves = 3 * layers
    assert before - after >= kept_leaves * (2 * MICROBATCHES - 1)
    assert count(planned, "reduce_scatter") == count(program, "reduce_scatter")
    assert_same_values(planned, program, mesh)


@pytest.mark.pure
def test_what_a_loop_changes_is_gathered_in_it():
    def moving(params, batch):
        def body(weights, row):
            return weights * 0.9, jnp.mean((row @ weights) ** 2)

        return lax.scan(body, params["w"], batch)[1].mean()

    program, _ = accumulating(lambda params, batch: moving(params, batch[None]), {"w": (WIDTH, WIDTH)})
    assert count(program, "all_gather")
    assert [hoistable_gathers(loop.eqn) for loop in find_loops(program)] == [()] * 3


@pytest.mark.pure
def test_gathers_of_different_parameters_are_not_the_same():
    program, _ = sharded(chain_loss, CHAIN)
    pairs = repeated_gathers(program).values()
    assert all(first.sources == again.sources for first, again in pairs)
    assert len({first.sources for first, _ in pairs}) == len(pairs) == len(CHAIN)


@pytest.mark.h100_aot
def test_a_straight_line_gathers_less_and_takes_no_more_than_what_is_kept():
    layers, width = 4, 2048
    params = {f"w{index}": (width, width) for index in range(layers)}
    program, mesh = sharded(chain_loss, params, (64, width), h100s(), optax.sgd(0.1))
    before, after = (compiled_for_h100s(each, mesh) for each in (program, until_backward(program, mesh, ALL)))
    assert [gathers(read(each.as_text()).entry.instructions) for each in (before, after)] == [2 * layers, layers]
    more = peak_bytes(after.memory_analysis()) - peak_bytes(before.memory_analysis())
    assert more <= 1.01 * layers * 4 * width * width


@pytest.mark.h100_aot
def test_microbatches_gather_less_and_take_no_more_than_what_is_kept():
    width, microbatches = 2048, 4
    params, batch = {"w": (2, width, width), "head": (width, width)}, (8 * 4 * microbatches, width)
    program, mesh = sharded(matrices_under_a_head_loss, params, batch, h100s(), optax.sgd(0.1), microbatches)

    def compiled(kept):
        planned = carry_out(program, mesh, [KeptGathers("microbatches", kept)])
        return compiled_for_h100s(replace_loops(planned, mesh, {"microbatches": hidden_trip_count}), mesh)

    before, after = compiled(()), compiled(("head @forward",))
    modules = [read(each.as_text()) for each in (before, after)]
    assert [gathers(module.entry.instructions) for module in modules] == [0, 1]
    inside = [sum(gathers(body.instructions) for body in loop_bodies(module)) for module in modules]
    assert inside[1] == inside[0] - 1
    more = peak_bytes(after.memory_analysis()) - peak_bytes(before.memory_analysis())
    assert 0 < more <= 1.01 * 4 * width * width
