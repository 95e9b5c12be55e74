"""What is proposed for unrolled layers: legal, within the limit, only where something is waited for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.names import value_names
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_memory import memory_of_program
from jax_deepcompile.costs.program_time import EquationTime
from jax_deepcompile.costs.simulation import Loop, Totals
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.layers import pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.strategies.deepen_loops import DeepenLoops
from jax_deepcompile.planner.strategies.gradients_in_turn import WaitForGradients
from jax_deepcompile.planner.strategies.keep_activations import KeepActivations
from jax_deepcompile.planner.strategies.pipeline_loops import PipelineLoops
from jax_deepcompile.planner.strategies.prefetch import PrefetchGathers
from jax_deepcompile.planner.strategies.reduce_in_order import ReduceInOrder
from jax_deepcompile.planner.strategies.stacks_in_turn import StacksInTurn
from jax_deepcompile.planner.strategies.unshard import Unshard
from jax_deepcompile.planner.strategies.unshard_unrolled import UnshardUnrolled
from jax_deepcompile.planner.unrolled import Repeat, choose_unsharded, chosen_anew, exposed_seconds
from jax_deepcompile.transforms.gradients_in_turn import GradientsInTurn
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions, reduction_buckets
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments
from jax_deepcompile.transforms.unshard import ReusedGathers
from tests.partition.steps import shapes, training_step
from tests.planner.situations import (
    HEADED,
    START,
    UNROLLED,
    WAITS,
    Clock,
    candidate,
    in_pipelines,
    situation,
    unrolled_loss,
)
from tests.transforms.programs import (
    assert_same_values,
    count,
    deeper_schedules,
    headed_loss,
    layer,
    run_stack,
    sharded,
    stack_loss,
    stack_shapes,
)

IN_ORDER = [OrderedReductions(1)]


def stay(plan: Plan) -> int:
    """How many gathers of ``plan`` stay from forward to backward."""
    return sum(len(each.gathers) for each in plan.of(ReusedGathers))


@pytest.mark.cpu_mesh
def test_kept_prefetched_and_reduced_in_order_the_bits_are_the_same():
    program, best, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=2.0))
    (early, _) = PrefetchGathers().propose(program, best, environment)
    kept, alone = UnshardUnrolled().propose(program, replace(best, plan=early.plan), environment)
    assert stay(kept.plan) == stay(alone.plan) > 0
    assert kept.plan.of(Prefetch)
    assert not alone.plan.of(Prefetch)
    planned = kept.plan.having(OrderedReductions, IN_ORDER).program(program, environment.mesh)
    assert count(planned, "all_gather") == count(program, "all_gather") - stay(kept.plan)
    assert_same_values(planned, program, environment.mesh)


@pytest.mark.pure
@pytest.mark.parametrize("proposer", [PrefetchGathers(), UnshardUnrolled(), ReduceInOrder()])
def test_layer_loops_are_left_to_their_own_passes(proposer):
    program, best, environment = situation(stack_loss, {"stack": stack_shapes()}, Clock())
    assert list(proposer.propose(program, best, environment)) == []


@pytest.mark.pure
def test_nothing_is_kept_without_memory_or_need():
    program, best, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=2.0), limit=0)
    assert list(UnshardUnrolled().propose(program, best, environment)) == []
    program, best, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=0.0))
    assert list(UnshardUnrolled().propose(program, best, environment)) == []


@pytest.mark.pure
@pytest.mark.parametrize(("slowed_s", "count"), [(0.5, 9), (0.001, 0)])
def test_what_hides_is_kept_where_kernels_lose_enough_beside_it(slowed_s, count):
    program, _, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=1e-2))
    run = SimpleNamespace(totals=Totals(communication_s=0.06, slowed_s=slowed_s * 0.06), loops=())
    quiet = candidate(program, prediction=replace(WAITS, exposed_s=0.0, step_s=1.0), simulation=run)
    assert sum(stay(each.plan) for each in UnshardUnrolled().propose(program, quiet, environment)) == count


def mixed_loss(params, x):
    """Layers one by one around a loop over others."""
    x = jax.checkpoint(layer)(x, params["layer0"])
    x = jax.checkpoint(layer)(run_stack(params["stack"], x), params["layer1"])
    return jnp.mean(jax.checkpoint(layer)(x, params["layer2"]) ** 2)


MIXED = UNROLLED | {"stack": stack_shapes()}


def beside_loops(loss, params):
    """The situation once the loops of ``loss`` are pipelined and nothing of them is waited for."""
    program, _, environment = situation(loss, params, Clock(gather_s=2.0))
    plan, quiet = in_pipelines(program), SimpleNamespace(totals=Totals(), loops=())
    return program, candidate(plan.program(program, environment.mesh), plan, simulation=quiet), environment


@pytest.mark.cpu_mesh
def test_layers_beside_loops_are_kept_and_prefetched_to_the_same_bits():
    program, best, environment = beside_loops(mixed_loss, MIXED)
    (early, *_) = PrefetchGathers().propose(program, best, environment)
    assert early.plan.of(LoopSchedule) == best.plan.of(LoopSchedule)
    kept, _ = UnshardUnrolled().propose(program, replace(best, plan=early.plan), environment)
    assert stay(kept.plan)
    assert kept.plan.of(Prefetch)
    planned = kept.plan.having(OrderedReductions, IN_ORDER).program(program, environment.mesh)
    assert_same_values(planned, program, environment.mesh)


@pytest.mark.cpu_mesh
def test_what_surrounds_deeper_loops_is_chosen_anew():
    """One more iteration apart has gathers of its own."""
    program, best, environment = beside_loops(mixed_loss, MIXED)
    (early, *_) = PrefetchGathers().propose(program, best, environment)
    kept, _ = UnshardUnrolled().propose(program, replace(best, plan=early.plan), environment)
    deeper = pipelined(kept.plan, program, deeper_schedules(program, 2, 2))
    assert not deeper.of(Prefetch)
    assert not stay(deeper)
    anew = chosen_anew(program, deeper, replace(best, plan=kept.plan), environment)
    assert stay(anew) >= stay(kept.plan)
    assert anew.of(Prefetch)
    assert_same_values(anew.program(program, environment.mesh), program, environment.mesh)


@pytest.mark.pure
@pytest.mark.parametrize("proposer", [PrefetchGathers(), UnshardUnrolled(), ReduceInOrder()])
def test_what_surrounds_loops_is_no_matter_of_straight_lines(proposer):
    """Embeddings and heads, and layers where it is loops that wait."""
    program, best, environment = beside_loops(headed_loss, HEADED)
    assert list(proposer.propose(program, best, environment)) == []
    program, best, environment = beside_loops(mixed_loss, MIXED)
    waiting = Loop("while", "", 5, True, 1.0, Totals(exposed_s={Stream.ALL_GATHER: 0.2}))
    busy = candidate(best.program, best.plan, simulation=SimpleNamespace(totals=Totals(), loops=(waiting,)))
    assert list(proposer.propose(program, busy, environment)) == []


@pytest.mark.slow
@pytest.mark.h100_aot
def test_layers_beside_a_loop_are_waited_for_less():
    """Four layers of 50 MB in a loop, as many beside it, on 32 H100s whose memory holds them all."""
    width, layers = 2048, 4
    shape = {"up": (width, 4 * width), "down": (4 * width, width), "bias": (4 * width,)}
    params = {f"layer{index}": shape for index in range(layers)}
    params["stack"] = {name: (layers, *dims) for name, dims in shape.items()}

    def loss(params, x):
        for index in range(layers // 2):
            x = jax.checkpoint(layer)(x, params[f"layer{index}"])
        x = run_stack(params["stack"], x)
        for index in range(layers // 2, layers):
            x = jax.checkpoint(layer)(x, params[f"layer{index}"])
        return jnp.mean(x**2)

    mesh = deepcompile.targets.h100(nodes=4).make_mesh((32,), ("fsdp",))
    optimizer = optax.sgd(0.1)
    step = deepcompile.shard(training_step(loss, optimizer), mesh, memory_limit="40GiB")
    state = {"params": shapes(params), "opt_state": jax.eval_shape(optimizer.init, shapes(params))}
    loops_alone = step.reshard(passes=(PipelineLoops(), KeepActivations(), Unshard(), KeepActivations(), DeepenLoops()))
    batch = shapes((32 * 1024, width))
    found, before = (each.plan(state, batch).prediction for each in (step, loops_alone))
    assert found is not None
    assert before is not None
    assert found.step_s < 0.95 * before.step_s


def wide_loss(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


@pytest.mark.pure
def test_reductions_follow_one_another_where_something_is_waited_for():
    program, mesh = sharded(wide_loss, {f"layer{index}": (1024, 1024) for index in range(4)}, batch=(4096, 1024))
    best, environment = candidate(program), Environment(mesh, "cuda", CostModel(), None)
    found, together = ReduceInOrder(latency_shares=(1.0, 1e-6)).propose(program, best, environment)
    assert found.plan == START.having(OrderedReductions, [OrderedReductions(1 << 20, in_loops=True)])
    hidden, ordered = candidate(program, prediction=replace(WAITS, exposed_s=0.0)), candidate(program, plan=found.plan)
    assert list(ReduceInOrder(latency_shares=(1.0,)).propose(program, hidden, environment)) == []
    assert list(ReduceInOrder(latency_shares=(1.0,)).propose(program, ordered, environment)) == []
    assert len(reduction_buckets(program.jaxpr, together.plan.of(OrderedReductions)[0].bucket_bytes)) == 2


@pytest.mark.pure
def test_the_most_seconds_for_the_least_memory_come_first():
    repeats = Repeat("dear", 1.0, 0.0, 100, 9.0), Repeat("cheap", 0.5, 0.5, 100, 1.0), Repeat("free", 0.0, 0.0, 1, 1.0)
    assert choose_unsharded(repeats, 150) == (ReusedGathers(("cheap",)),)
    assert choose_unsharded(repeats, 200) == (ReusedGathers(("dear", "cheap")),)
    assert choose_unsharded(repeats, 99) == ()


@pytest.mark.pure
def test_a_gather_hides_behind_what_is_computed_since_the_last_collective():
    work, gather = EquationTime(compute_s=1.0), EquationTime(network_s=3.0)
    assert exposed_seconds([gather, work, work, gather, work], [(3, 4)]) == [1.0]
    assert exposed_seconds([work, work, work, work, gather, work], [(4, 5)]) == [0.0]
    assert exposed_seconds([work, gather, gather, work], [(1, 3), (2, 3)]) == [2.0, 3.0]


@pytest.mark.pure
def test_where_memory_may_not_have_the_room_gathers_start_later_otherwise():
    program, _, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=2.0))
    peak_bytes = memory_of_program(program).live_peak_bytes
    tight = candidate(program, prediction=replace(WAITS, peak_bytes=peak_bytes))
    (roomy, _), (close, _) = (
        list(PrefetchGathers().propose(program, tight, replace(environment, limit_bytes=limit)))
        for limit in (1 << 30, int(1.02 * peak_bytes))
    )
    assert roomy.otherwise is None
    assert close.otherwise is not None
    places = {name: place for place, name in enumerate(value_names(program.jaxpr, phased=True).values())}
    started, later = (
        {each.gather: places[each.after] for each in plan.of(Prefetch)} for plan in (close.plan, close.otherwise.plan)
    )
    assert all(later[gather] >= after for gather, after in started.items())


@pytest.mark.pure
@pytest.mark.parametrize(
    ("loss", "params"), [(stack_loss, {"stack": stack_shapes()}), (unrolled_loss, UNROLLED)], ids=["layers", "no loops"]
)
def test_where_layers_have_no_loops_inside_no_stacks_wait(loss, params):
    program, best, environment = situation(loss, params, Clock())
    assert list(StacksInTurn().propose(program, best, environment)) == []


def taking(loss, params, peak_bytes: int, limit: int | None):
    """A situation in which a step takes ``peak_bytes``."""
    program, _, environment = situation(loss, params, Clock(), limit)
    return program, candidate(program, prediction=replace(WAITS, peak_bytes=peak_bytes)), environment


def test_gradients_are_waited_for_where_a_step_does_not_fit():
    (found,) = WaitForGradients(waiting_share=0.5).propose(*taking(unrolled_loss, UNROLLED, 101, 100))
    assert found.plan == START.having(GradientsInTurn, [GradientsInTurn("", 50)])
    assert found.otherwise is not None
    assert found.otherwise.plan == START.having(GradientsInTurn, [GradientsInTurn("", 0)])
    assert found.otherwise.otherwise is None


@pytest.mark.parametrize(
    ("loss", "params", "limit"),
    [(unrolled_loss, UNROLLED, 101), (unrolled_loss, UNROLLED, None), (headed_loss, HEADED, 100)],
    ids=["it fits", "no limit", "layers in a loop"],
)
def test_otherwise_gradients_may_come_whenever_they_do(loss, params, limit):
    assert list(WaitForGradients().propose(*taking(loss, params, 101, limit))) == []


@pytest.mark.h100_aot
def test_layers_with_loops_inside_are_computed_again_as_a_whole_where_memory_needs_it():
    """Eight recurrent layers on 8 H100s, in half of the memory that they take as they are written; iterations of their
    loops by themselves would take 125 MiB."""
    width, steps = 512, 128

    def recurrent(x, weights):
        def cell(h, now):
            h = jnp.tanh(now @ weights["up"] + h @ weights["down"]) * jax.nn.sigmoid(now)
            return h, h

        return x + lax.scan(cell, jnp.zeros_like(x[0]), jnp.sin(x))[1]

    def loss(params, x):
        for name in sorted(params):
            x = recurrent(x, params[name])
        return jnp.mean(x**2)

    params = {f"layer{index}": dict.fromkeys(("up", "down"), (width, width)) for index in range(8)}
    mesh, optimizer = deepcompile.targets.h100().make_mesh((8,), ("fsdp",)), optax.sgd(0.1)
    step = deepcompile.shard(training_step(loss, optimizer), mesh, passes=(StacksInTurn(), KeepActivations()))
    state = {"params": shapes(params), "opt_state": jax.eval_shape(optimizer.init, shapes(params))}
    batch = shapes((steps, 64, width))
    roomy = step.reshard(memory_limit="40GiB").plan(state, batch)
    tight = step.reshard(memory_limit="100MiB", host_memory_limit=1).plan(state, batch)
    assert not roomy.of(RematerializedSegments)
    assert [each.with_loops for each in tight.of(RematerializedSegments)] == [True]
