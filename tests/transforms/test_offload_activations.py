"""What is on the host between forward and backward comes back as the same bits, and nothing else goes there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.ir.memory import is_fetch, is_offload, is_on_host
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.layers import copying_ahead
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import find_recomputation
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.offload_activations import OffloadedActivations, offloadable
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from tests.cases import examples, in_turn
from tests.partition.steps import lines
from tests.transforms.programs import (
    GROUPS,
    LAYERS,
    MATRICES,
    OPERATIONS,
    POLICIES,
    STACK,
    WIDTH,
    assert_same_values,
    backwards_loss,
    count,
    groups_loss,
    layer,
    layers_loss,
    loop_names,
    matrices_loss,
    outline,
    plain_loss,
    sharded,
    stack_loss,
    stack_shapes,
    two_stacks_loss,
)

LOOPS = ("stack @forward", "stack @backward")
MATRIX_LOOPS = ("w @forward", "w @backward")
INPUT = "stack input"


def all_kept(program: Program) -> list[KeptActivations]:
    turns = find_recomputation(program, CostModel())
    return [KeptActivations(*turn.loops, turn.names) for turn in turns if turn.is_of_loops and turn.names]


def all_offloaded(program: Program, kept: list[KeptActivations], mesh) -> list[OffloadedActivations]:
    """With all that is ``kept``, all that any loop leaves for another one alone."""
    program, found = carry_out(program, mesh, kept), []
    for forward in find_loops(program):
        for backward in find_loops(program):
            if backward.path[:-1] == forward.path[:-1] and backward.path > forward.path:
                names = tuple(each.name for each in offloadable(program, forward, backward))
                found += [OffloadedActivations(forward.name, backward.name, names)] * bool(names)
    return found


def merged_loss(params, batch):
    """With nothing that keeps XLA from computing early what is computed again."""
    body = jax.checkpoint(layer, prevent_cse=False)
    return jnp.mean(lax.scan(lambda x, params: (body(x, params), None), batch, params["stack"])[0] ** 2)


def named_loss(params, batch):
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("up"))
    def body(x, params):
        return x + jnp.tanh(checkpoint_name(x @ params["up"], "up") + params["bias"]) @ params["down"], None

    return jnp.mean(lax.scan(body, batch, params["stack"])[0] ** 2)


def down_and_up_loss(params, batch):
    """Layers whose results layers on the way back up add to theirs, too."""

    def down(x, params):
        x = layer(x, params)
        return x, x

    def up(x, given):
        params, beside = given
        return layer(x + beside, params), None

    x, beside = lax.scan(jax.checkpoint(down), batch, params["down"])
    return jnp.mean(lax.scan(up, x, (params["up"], beside), reverse=True)[0] ** 2)


def barrier_loss(params, batch):
    """What the forward loop stacks is behind a barrier when the backward loop reads it."""

    @jax.custom_vjp
    def layers(stack, x):
        return forward(stack, x)[0]

    def forward(stack, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, stack)

    def whole(stack, x):
        x, inputs = forward(stack, x)
        return x, (stack, inputs)

    def backward(kept, g):
        def body(g, layer):
            w, x = layer
            y = jnp.tanh(x @ w)
            g = g * (1 - y * y)
            return g @ w.T, x.T @ g

        g, (stack, inputs) = lax.optimization_barrier((g, kept))
        g, grads = lax.scan(body, g, (stack, inputs), reverse=True)
        return grads, g

    layers.defvjp(whole, backward)
    return jnp.mean(layers(params["w"], batch) ** 2)


def dropping_loss(params, batch):
    """Each layer splits a key of its own off."""

    @jax.checkpoint
    def dropped(x, key, params):
        return layer(jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0), params)

    def body(carry, params):
        x, key = carry
        key, own = jax.random.split(key)
        return (dropped(x, own, params), key), None

    return jnp.mean(lax.scan(body, (batch, jax.random.key(1)), params["stack"])[0][0] ** 2)


CASES = {
    "checkpointed": (stack_loss, STACK, {}),
    "not checkpointed": (plain_loss, STACK, {}),
    "no barriers": (merged_loss, STACK, {}),
    "a barrier between": (barrier_loss, MATRICES, {}),
    "policy": (named_loss, STACK, {}),
    "reverse": (backwards_loss, STACK, {}),
    "random": (dropping_loss, STACK, {}),
    "two stacks": (two_stacks_loss, {"a": stack_shapes(3), "b": stack_shapes()}, {}),
    "down and up": (down_and_up_loss, {"down": stack_shapes(3), "up": stack_shapes(3)}, {}),
    "loop in a loop": (groups_loss, GROUPS, {}),
    "microbatches": (stack_loss, STACK, {"microbatches": 2}),
}


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("case", "pipelined"), in_turn({case: (case,) for case in CASES}, {"plain": False, "pipelined": True})
)
def test_values_stay_the_same(case, pipelined):
    loss, params, options = CASES[case]
    program, mesh = sharded(loss, params, **options)
    kept = all_kept(program)
    away = all_offloaded(program, kept, mesh)
    plan = Plan("0", (*kept, *away))
    if pipelined:
        plan = copying_ahead(plan, program, mesh)
        assert plan.of(LoopSchedule)
    planned = plan.program(program, mesh)
    assert count(planned, "device_put") >= 2 * sum(len(each.values) for each in away)
    assert_same_values(planned, plan.having(OffloadedActivations, ()).program(program, mesh), mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("ahead", "behind", "first", "last"), [(1, 1, 1, 1), (2, 2, 0, 0), (0, 0, 0, 2), (1, 1, 5, 5)])
def test_at_every_depth_values_stay_the_same(ahead, behind, first, last):
    program, mesh = sharded(matrices_loss, MATRICES)
    away = all_offloaded(program, [], mesh)
    schedules = [LoopSchedule(name, ahead, behind, first, last) for name in loop_names(program)]
    planned = carry_out(program, mesh, [*away, *schedules])
    assert_same_values(planned, carry_out(program, mesh, schedules), mesh)


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(matrices_loss, MATRICES)
    gather, product, reduce = "  all_gather", "  dot_general", "  reduce_scatter"
    forward, backward = [gather, product], [gather, product, product, reduce, product]
    assert outline(program) == ["scan 4", *forward, "scan 4", *backward]
    planned = OffloadedActivations.apply(program, mesh, [OffloadedActivations(*MATRIX_LOOPS, ("w input",))])
    copy = "  device_put"
    assert outline(planned, "device_put") == ["scan 4", *forward, copy, "scan 4", copy, *backward]
    one, whole = f"f32[2,{WIDTH}]", f"f32<host>[4,2,{WIDTH}]"
    there, back = (line.split()[1:] for line in lines(planned, ("device_put",)) if copy in line)
    assert (there, back) == ([one, "->", f"f32<host>[2,{WIDTH}]"], [f"f32<host>[2,{WIDTH}]", "->", one])
    ahead, behind = find_loops(planned)
    assert [var.aval.str_short(short_dtypes=True) for var in Scan(ahead.eqn).results.ys] == [whole]
    assert whole in [var.aval.str_short(short_dtypes=True) for var in Scan(behind.eqn).operands.xs]


@pytest.mark.pure
def test_a_loop_may_copy_late_and_fetch_early():
    program, mesh = sharded(matrices_loss, MATRICES)
    planned = OffloadedActivations.apply(program, mesh, [OffloadedActivations(*MATRIX_LOOPS, ("w input",))])
    forward, backward = (split_body(loop.eqn) for loop in find_loops(planned))
    assert [is_offload(eqn) for eqn in forward.late.jaxpr.eqns] == [True]
    assert [is_fetch(eqn) for eqn in backward.early.jaxpr.eqns].count(True) == 1
    assert len(backward.gathered) == len(backward.early.outputs) - 1


@pytest.mark.pure
def test_stacks_of_pipelined_loops_begin_and_stay_on_the_host():
    program, mesh = sharded(matrices_loss, MATRICES)
    away = OffloadedActivations(*MATRIX_LOOPS, ("w input",))
    planned = copying_ahead(Plan("0", (away,)), program, mesh).program(program, mesh)
    for loop in find_loops(planned):
        stacks = [atom for atom in loop.eqn.invars if atom.aval.shape == (4, 2, WIDTH)]
        assert [is_on_host(atom) for atom in stacks].count(True) == 1


@pytest.mark.pure
def test_what_was_just_copied_out_is_not_copied_back():
    """At the turn, the last layer's input: where XLA finds two readers of a copy to the host it may crash."""
    program, mesh = sharded(matrices_loss, MATRICES)
    away = OffloadedActivations(*MATRIX_LOOPS, ("w input",))
    planned = copying_ahead(Plan("0", (away,)), program, mesh).program(program, mesh)
    eqns = open_jaxpr(planned.jaxpr).eqns
    copies = [var for eqn in eqns if is_offload(eqn) for var in eqn.outvars]
    assert copies
    assert all(sum(var in eqn.invars for eqn in eqns) == 1 for var in copies)
    assert not any(map(is_fetch, eqns))


@examples(20)
@given(
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4),
    st.sampled_from(sorted(POLICIES)),
    st.sets(st.integers(0, 40)),
    st.booleans(),
)
@pytest.mark.pure
def test_planning_and_plans_call_it_the_same(operations, policy, positions, reverse):
    """What is kept of whatever layers, and what stays anyway, by the names that it has where nothing is kept."""

    program, mesh = sharded(layers_loss(operations, policy, reverse), STACK)
    for turn in find_recomputation(program, CostModel()):
        kept = tuple({turn.names[each % len(turn.names)] for each in positions}) if turn.names else ()
        away = (*kept, *(each.name for each in turn.residuals))
        carry_out(program, mesh, [KeptActivations(*turn.loops, kept), OffloadedActivations(*turn.loops, away)])


@pytest.mark.pure
def test_some_of_them_is_enough():
    program, mesh = sharded(plain_loss, STACK)
    planned = OffloadedActivations.apply(program, mesh, [OffloadedActivations(*LOOPS, ("layer tanh",))])
    assert count(planned, "device_put") == 2 * LAYERS
    assert [is_on_host(stack) for stack in Scan(next(find_loops(planned)).eqn).results.ys].count(True) == 1


@pytest.mark.pure
def test_a_plan_reads_in_words_and_comes_back_from_json():
    plan = Plan("0", (OffloadedActivations(*LOOPS, (INPUT, "stack/mlp tanh")),))
    assert str(plan) == "stack @forward: copies stack input, mlp tanh to the host for stack @backward"
    assert Plan.from_json(plan.to_json()) == plan


def scanned_twice(read_again: Callable, layers: int = LAYERS) -> Program:
    """A loop that stacks its results, and one that reads all or some of them; ``read_again`` returns more of them."""

    def loss(params, batch):
        x, stacked = lax.scan(lambda x, w: (jnp.tanh(x @ w),) * 2, batch, params["w"])
        x, _ = lax.scan(lambda x, y: (jnp.sin(x) * y, None), x, stacked[:layers] if layers < LAYERS else stacked)
        return lax.stop_gradient(jnp.mean(x) + read_again(stacked, x))

    return sharded(loss, {"w": (LAYERS, WIDTH, WIDTH)})[0]


def names_of_what_may_go(program: Program) -> list[str]:
    forward, backward = find_loops(program)
    return [each.name for each in offloadable(program, forward, backward)]


@pytest.mark.pure
@pytest.mark.parametrize(
    ("read_again", "may_go"),
    [
        (lambda stacked, x: 0.0, True),
        (lambda stacked, x: jnp.sum(stacked[-1]), False),
        (lambda stacked, x: jnp.sum(lax.optimization_barrier((stacked, x))[0]), False),
    ],
    ids=["alone", "a slice", "behind a barrier"],
)
def test_what_is_read_elsewhere_stays(read_again, may_go):
    assert names_of_what_may_go(scanned_twice(read_again)) == ["<lambda> tanh"] * may_go


@pytest.mark.pure
def test_what_a_loop_reads_as_a_whole_stays():
    def loss(params, batch):
        x, stacked = lax.scan(lambda x, w: (jnp.tanh(x @ w),) * 2, batch, params["w"])
        return lax.stop_gradient(jnp.mean(lax.scan(lambda x, y: (x * y + stacked.sum(), None), x, stacked)[0]))

    program, _ = sharded(loss, {"w": (LAYERS, WIDTH, WIDTH)})
    assert names_of_what_may_go(program) == []


@pytest.mark.pure
def test_loops_of_different_lengths_leave_nothing_to_each_other():
    assert names_of_what_may_go(scanned_twice(lambda stacked, x: 0.0, layers=LAYERS - 1)) == []


@pytest.mark.pure
def test_keys_and_numbers_of_a_layer_stay():
    def loss(params, batch):
        def first(carry, w):
            x, key = carry
            key, own = jax.random.split(key)
            x = jnp.tanh(x @ w)
            return (x, key), (x, own, x[0, 0])

        def second(x, given):
            y, key, scale = given
            return x * y * scale + jax.random.normal(key, x.shape), None

        (x, _), stacked = lax.scan(first, (batch, jax.random.key(0)), params["w"])
        return lax.stop_gradient(jnp.mean(lax.scan(second, x, stacked)[0]))

    program, _ = sharded(loss, {"w": (LAYERS, WIDTH, WIDTH)})
    assert names_of_what_may_go(program) == ["first tanh"]
