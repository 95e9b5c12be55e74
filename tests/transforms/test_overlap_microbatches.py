"""The next microbatch's forward pass beside this one's backward pass computes the same bits."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import reduces_gradients
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.lowering.compile import compile_options, double_buffering
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.lowering.latencies import latency_options
from jax_deepcompile.planner.layers import keep_gathered, pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.scheduler_latencies import scheduler_latencies
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop, find_halves
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.save_gathered import SavedGathers
from tests.partition.steps import shapes, training_step
from tests.schedules import loop_bodies, work_while_under_way
from tests.transforms.programs import (
    BATCH,
    LAYERS,
    MATRICES,
    STACK,
    WIDTH,
    assert_same_values,
    backwards_loss,
    count,
    h100s,
    inner_loops,
    layer,
    matrices_loss,
    outer_loops,
    outline,
    plain_loss,
    run_stack,
    sharded,
    stack_loss,
    stack_shapes,
    two_stacks_loss,
)


def with_head(params, batch):
    """Something of its own before, between and after the layers, and numbers that leave as they are."""
    x = run_stack(params["stack"], jnp.tanh(batch @ params["first"]))
    return jnp.mean((x @ params["last"]) ** 2)


HEAD = STACK | {"first": (WIDTH, WIDTH), "last": (WIDTH, 3)}


def in_microbatches(loss, params, microbatches: int = 4, mesh=None):
    """The fully sharded training step of ``loss`` in microbatches: the program and its mesh."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    return sharded(loss, params, (microbatches * BATCH, WIDTH), mesh, optimizer, microbatches)


def pipelining(program, first: int = 0, last: int = 0) -> Plan:
    schedules = [
        dataclasses.replace(each, first_layers=each.first_layers + first, last_layers=each.last_layers + last)
        for each in choose_schedules(program)
    ]
    return pipelined(Plan("0"), program, schedules)


def overlapped(plan: Plan) -> Plan:
    return plan.having(MicrobatchLoop, [dataclasses.replace(each, overlap=True) for each in plan.of(MicrobatchLoop)])


def up_to_microbatches(program, mesh, plan: Plan):
    """``program`` as ``plan`` makes it, but for how the loops around its layer loops run."""
    return plan.program(program, mesh, until=DelayedReductions)


def assert_same(program, mesh, plan: Plan, microbatches: int = 4) -> None:
    """That the overlapped program computes the same bits as the plan without, and communicates as often.

    One forward and one backward pass are outside of its loop, and one of each inside.
    """
    before, after = plan.program(program, mesh), overlapped(plan).program(program, mesh)
    counted = up_to_microbatches(program, mesh, plan)
    for primitive in ("all_gather", "reduce_scatter"):
        outside_and_one = count(before, primitive)
        one = (count(counted, primitive) - outside_and_one) // (microbatches - 1)
        assert count(after, primitive) == outside_and_one + one, (
            "one forward and one backward pass outside, both inside"
        )
    assert_same_values(after, before, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("loss", "params"),
    [
        (stack_loss, STACK),
        (with_head, HEAD),
        pytest.param(backwards_loss, STACK, marks=pytest.mark.slow),
        pytest.param(plain_loss, STACK, marks=pytest.mark.slow),
        (two_stacks_loss, {"a": stack_shapes(), "b": stack_shapes(4)}),
    ],
    ids=["stack", "head", "reverse", "saving", "two stacks"],
)
def test_values_stay_the_same(loss, params):
    program, mesh = in_microbatches(loss, params)
    assert_same(program, mesh, pipelining(program))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("microbatches", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_few_microbatches(microbatches):
    program, mesh = in_microbatches(with_head, HEAD, microbatches)
    assert_same(program, mesh, pipelining(program), microbatches)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("first", "last"), [*(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 0), (0, 1))), (1, 1)]
)
def test_peeled_iterations(first, last):
    program, mesh = in_microbatches(with_head, HEAD)
    assert_same(program, mesh, pipelining(program, first, last))


@pytest.mark.cpu_mesh
def test_on_two_axes():
    program, mesh = in_microbatches(with_head, HEAD, mesh={"data": 2, "fsdp": 4})
    assert_same(program, mesh, pipelining(program))


@pytest.mark.cpu_mesh
def test_what_microbatches_keep_gathered_is_gathered_once():
    program, mesh = in_microbatches(with_head, HEAD)
    plan = pipelining(program)
    kept = keep_gathered(up_to_microbatches(program, mesh, plan), float("inf"))
    assert kept
    assert_same(program, mesh, plan.having(KeptGathers, kept))


@pytest.mark.cpu_mesh
def test_what_forward_hands_over():
    program, mesh = in_microbatches(stack_loss, STACK)
    saved = SavedGathers("stack @forward", "stack @backward", ("stack/up",))
    assert_same(program, mesh, pipelining(program).having(SavedGathers, [saved]))


@pytest.mark.cpu_mesh
def test_dropout_masks_are_those_of_the_microbatch():
    def loss(params, batch):
        def dropped(x, layer_and_key):
            params, key = layer_and_key
            return jax.checkpoint(layer)(x * jax.random.bernoulli(key, 0.5, x.shape), params), None

        keys = jax.random.split(jax.random.key(0), len(params["stack"]["bias"]))
        return jnp.mean(lax.scan(dropped, batch, (params["stack"], keys))[0] ** 2)

    program, mesh = in_microbatches(loss, STACK)
    assert_same(program, mesh, pipelining(program))


@pytest.mark.cpu_mesh
def test_the_users_own_accumulation_and_its_metrics():
    """A loop of the user's that carries the sum and stacks a number of every microbatch; backwards, for once."""
    microbatches, optimizer = 4, optax.sgd(0.1)

    def step(state, batches):
        def one(total, batch):
            value, gradients = jax.value_and_grad(with_head)(state["params"], batch)
            return jax.tree.map(jnp.add, total, gradients), value

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        parts = batches.reshape(BATCH, microbatches, WIDTH).swapaxes(0, 1)
        gradients, values = lax.scan(one, zeros, parts, reverse=True)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, values

    params = shapes(HEAD)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    sharded_step = deepcompile.shard(step, {"fsdp": 8})
    program = sharded_step.trace(state, shapes((BATCH * microbatches, WIDTH))).sharded
    assert_same(program, sharded_step.mesh, pipelining(program), microbatches)


@pytest.mark.cpu_mesh
def test_a_step_planned_so_trains_as_on_one_device():
    """Beside the values: what explain() counts, and what the simulated program sends, is what it is without."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = training_step(with_head, optimizer)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype) * 0.3, shapes(HEAD))
    state = {"params": params, "opt_state": optimizer.init(params)}
    batch = random.normal(size=(4 * BATCH, WIDTH)).astype(np.float32)
    wanted = jax.jit(step)(state, batch)

    plain = deepcompile.shard(step, {"fsdp": 8}, microbatches=4, passes=())
    plan = overlapped(pipelining(plain.trace(state, batch).sharded))
    planned = plain.reshard(plan=plan)
    assert "forward of the next iteration beside backward" in str(planned.plan(state, batch))
    sent = [deepcompile.simulate(each.trace(state, batch), plain.mesh).sent_bytes for each in (plain, planned)]
    assert sent[0] == sent[1]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), planned(state, batch), wanted)


def outer_loop(program, mesh):
    (outer,) = outer_loops(up_to_microbatches(program, mesh, pipelining(program)))
    return outer


@pytest.mark.pure
def test_before_and_after():
    """The reductions after the loop over layers are those of the layers peeled off its ends."""
    program, mesh = in_microbatches(matrices_loss, MATRICES)
    plan = pipelining(program)

    def of_loops(program) -> list[str]:
        return [line for line in outline(program) if not line.endswith("dot_general")]

    gather, reduce = ["all_gather"], ["reduce_scatter"]
    forward = [*gather, "scan 3", "  all_gather"]
    backward = [*gather * 2, "scan 2", "  all_gather", "  reduce_scatter", *reduce * 2]
    assert of_loops(up_to_microbatches(program, mesh, plan)) == ["scan 4", *within([*forward, *backward])]
    both = [*gather * 4, "scan 2", *["  all_gather"] * 2, "  reduce_scatter", *reduce * 2]
    assert of_loops(overlapped(plan).program(program, mesh)) == [*forward, "while", *within(both), *backward]


def within(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


@pytest.mark.pure
def test_forward_hands_over_what_backward_reads_and_no_more():
    program, mesh = in_microbatches(with_head, HEAD)
    halves = find_halves(outer_loop(program, mesh).eqn)
    assert halves is not None
    inputs_bytes = 4 * LAYERS * (BATCH // 8) * WIDTH
    last_layer_bytes = 4 * (2 * WIDTH * 2 * WIDTH + 2 * WIDTH)
    assert inputs_bytes <= halves.saved_bytes < 2 * inputs_bytes + last_layer_bytes
    first = {id(eqn) for eqn in halves.ahead}
    assert halves.forward is halves.ahead[-1]
    assert not first.intersection(id(eqn) for eqn in (*halves.after, halves.backward))


@pytest.mark.pure
def test_of_two_stacks_the_one_where_forward_turns_to_backward():
    program, mesh = in_microbatches(two_stacks_loss, {"a": stack_shapes(), "b": stack_shapes()})
    outer = outer_loop(program, mesh).eqn
    halves = find_halves(outer)
    assert halves is not None
    loops = [eqn for eqn in open_jaxpr(outer.params["jaxpr"]).eqns if eqn.primitive.name == "scan"]
    assert (loops.index(halves.forward), loops.index(halves.backward)) == (1, 2)


@pytest.mark.pure
def test_a_forward_pass_that_waits_for_the_last_microbatch_is_left_where_it_is():
    def step(params, batches):
        def one(carry, batch):
            total, shift = carry
            value, gradients = jax.value_and_grad(stack_loss)(params, batch + shift)
            return (jax.tree.map(jnp.add, total, gradients), value), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        (gradients, _), values = lax.scan(one, (zeros, 0.0), batches.reshape(BATCH, 4, WIDTH).swapaxes(0, 1))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), values

    sharded_step = deepcompile.shard(step, {"fsdp": 8})
    program = sharded_step.trace(shapes(STACK), shapes((BATCH * 4, WIDTH))).sharded
    assert find_halves(outer_loop(program, sharded_step.mesh).eqn) is None
    with pytest.raises(errors.PlanError, match="overlaps the iterations of step, which has no two layer loops"):
        overlapped(pipelining(program)).program(program, sharded_step.mesh)


def twice_loss(params, batch):
    """Tied layers: their gradients are added up over both loops before they are reduced."""
    return jnp.mean(run_stack(params["stack"], jnp.sin(run_stack(params["stack"], batch))) ** 2)


@pytest.mark.pure
def test_loops_none_of_which_reduces_gradients_are_left_alone():
    program, mesh = in_microbatches(twice_loss, STACK)
    loops = inner_loops(program)
    assert len(loops) == 4
    assert not any(reduces_gradients(loop.eqn) for loop in loops)
    assert find_halves(outer_loop(program, mesh).eqn) is None


@pytest.mark.cpu_mesh
def test_what_is_alike_for_all_microbatches_communicates_as_often_as_before():
    def step(params, batches):
        def loss(params, batch):
            prompt = run_stack(params["early"], jnp.tanh(params["start"]))
            return jnp.mean(run_stack(params["stack"], batch + prompt.mean(0)) ** 2)

        def one(total, batch):
            value, gradients = jax.value_and_grad(loss)(params, batch)
            return jax.tree.map(jnp.add, total, gradients), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        gradients, values = lax.scan(one, zeros, batches.reshape(BATCH, 4, WIDTH).swapaxes(0, 1))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), values

    params = STACK | {"early": stack_shapes(6), "start": (WIDTH, WIDTH)}
    sharded_step = deepcompile.shard(step, {"fsdp": 8})
    program = sharded_step.trace(shapes(params), shapes((BATCH * 4, WIDTH))).sharded
    assert_same(program, sharded_step.mesh, pipelining(program))


@pytest.mark.pure
def test_loops_of_very_different_lengths_are_left_alone():
    program, mesh = in_microbatches(stack_loss, {"stack": stack_shapes(9)})
    plan = pipelining(program)
    forward, backward = plan.of(LoopSchedule)
    plan = plan.having(LoopSchedule, [forward, dataclasses.replace(backward, first_layers=5)])
    (outer,) = outer_loops(up_to_microbatches(program, mesh, plan))
    assert find_halves(outer.eqn) is None


@pytest.mark.pure
def test_layer_loops_that_are_not_pipelined_are_left_alone():
    program, mesh = in_microbatches(stack_loss, STACK)
    (outer,) = outer_loops(program)
    assert find_halves(outer.eqn) is None
    with pytest.raises(errors.PlanError, match="iterations of microbatches, which has no two layer loops"):
        carry_out(program, mesh, [MicrobatchLoop("microbatches", overlap=True)])


@pytest.mark.h100_aot
def test_both_passes_communicate_beside_compute_in_one_loop():
    """In the loop of both every collective has work between start and done; forward's inputs are there twice."""
    rows, width, layers, microbatches = 2048, 1024, 8, 4
    params = {"stack": {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}}

    def loss(params, x):
        def block(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.mean(lax.scan(jax.checkpoint(block), x, params["stack"])[0] ** 2)

    batch = (8 * rows * microbatches, width)
    program, mesh = sharded(loss, params, batch, h100s(), optax.sgd(0.1), microbatches)
    options = compile_options("cuda") | double_buffering()

    def compiled(plan: Plan):
        lowered = lower(plan.program(program, mesh), mesh, "cuda")
        latencies = scheduler_latencies(deepcompile.simulate(lowered.compile(compiler_options=options), mesh))
        return lowered.compile(compiler_options=options | latency_options(latencies))

    plan = pipelining(program)
    apart, together = compiled(plan), compiled(overlapped(plan))
    simulated = deepcompile.simulate(together, mesh)
    (both,) = (loop for loop in simulated.loops if loop.is_innermost and loop.executions > 1)
    assert both.executions == microbatches - 1
    layer_bytes = 2 * 4 * width * 4 * width
    assert both.trip.gathered_bytes >= 2 * layer_bytes
    assert both.trip.reduced_bytes >= layer_bytes
    bodies = loop_bodies(read(together.as_text()))
    found = max(map(work_while_under_way, bodies), key=len)
    assert {kind for kind, _ in found} == {"all-gather-start", "reduce-scatter-start"}
    assert all(work for _, work in found), found
    more = together.memory_analysis().temp_size_in_bytes - apart.memory_analysis().temp_size_in_bytes
    inputs_bytes = layers * rows * width * 4
    assert more < 1.5 * inputs_bytes + 3 * layer_bytes
