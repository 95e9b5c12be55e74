"""What is proposed for unrolled layers: legal, within the limit, only where something is waited for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_memory import memory_of_program
from jax_deepcompile.costs.program_time import EquationTime
from jax_deepcompile.costs.simulation import Loop, Totals
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.planner.apply import apply_plan
from jax_deepcompile.planner.candidate import Environment, Trial
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.strategies.deepen_loops import DeepenLoops
from jax_deepcompile.planner.strategies.keep_activations import KeepActivations
from jax_deepcompile.planner.strategies.pipeline_loops import PipelineLoops
from jax_deepcompile.planner.strategies.straight_line import (
    PrefetchGathers,
    ReduceInOrder,
    Repeat,
    UnshardStraightLine,
    choose_unsharded,
    chosen_anew,
    exposed_seconds,
)
from jax_deepcompile.planner.strategies.unshard import Unshard
from jax_deepcompile.transforms.pipeline_loops import choose_schedules
from tests.partition.steps import shapes, training_step
from tests.transforms.programs import WIDTH, count, layer, run, run_stack, sharded, stack_loss, stack_shapes
from tests.transforms.test_prefetch import UNROLLED, Clock, unrolled_loss


def situation(loss, params, costs: CostModel, limit: int | None = 1 << 30, plan: Plan | None = None):
    program, mesh = sharded(loss, params)
    nothing: Any = None
    now = Trial(plan or Plan("0"), program, nothing, nothing, nothing, Prediction(1.0, 1.0, 1.0, 1.0, 0), 0)
    return program, now, Environment(mesh, "cuda", costs, limit)


@pytest.mark.cpu_mesh
def test_kept_prefetched_and_reduced_in_order_the_bits_are_the_same():
    program, now, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=2.0))
    (early, _) = PrefetchGathers().propose(program, now, environment)
    (kept,) = UnshardStraightLine().propose(program, replace(now, plan=early.plan), environment)
    assert kept.plan.unsharded
    assert kept.plan.prefetches
    planned = apply_plan(program, environment.mesh, kept.plan.replace(reduction_bucket_bytes=1))
    assert count(planned, "all_gather") == count(program, "all_gather") - len(kept.plan.unsharded)
    for got, expected in zip(run(planned, environment.mesh), run(program, environment.mesh), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.pure
@pytest.mark.parametrize("proposer", [PrefetchGathers(), UnshardStraightLine(), ReduceInOrder()])
def test_layer_loops_are_left_to_their_own_passes(proposer):
    program, now, environment = situation(stack_loss, {"stack": stack_shapes()}, Clock())
    assert list(proposer.propose(program, now, environment)) == []


@pytest.mark.pure
def test_nothing_is_kept_without_memory_or_need():
    program, now, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=2.0), limit=0)
    assert list(UnshardStraightLine().propose(program, now, environment)) == []
    program, now, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=0.0))
    assert list(UnshardStraightLine().propose(program, now, environment)) == []


def mixed_loss(params, x):
    """Layers one by one around a loop over others."""
    x = jax.checkpoint(layer)(x, params["layer0"])
    x = jax.checkpoint(layer)(run_stack(params["stack"], x), params["layer1"])
    return jnp.mean(jax.checkpoint(layer)(x, params["layer2"]) ** 2)


MIXED = UNROLLED | {"stack": stack_shapes()}


def beside_loops(loss, params):
    """The situation once the loops of ``loss`` are pipelined and nothing of them is waited for."""
    program, now, environment = situation(loss, params, Clock(gather_s=2.0))
    plan = Plan("0").replace(loops=choose_schedules(program))
    quiet: Any = SimpleNamespace(loops=())
    pipelined = apply_plan(program, environment.mesh, plan)
    return program, replace(now, plan=plan, program=pipelined, simulation=quiet), environment


@pytest.mark.cpu_mesh
def test_layers_beside_loops_are_kept_and_prefetched_to_the_same_bits():
    program, now, environment = beside_loops(mixed_loss, MIXED)
    (early, *_) = PrefetchGathers().propose(program, now, environment)
    assert early.plan.loops == now.plan.loops
    (kept,) = UnshardStraightLine().propose(program, replace(now, plan=early.plan), environment)
    assert kept.plan.unsharded
    assert kept.plan.prefetches
    planned = apply_plan(program, environment.mesh, kept.plan.replace(reduction_bucket_bytes=1))
    for got, expected in zip(run(planned, environment.mesh), run(program, environment.mesh), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.cpu_mesh
def test_deeper_loops_have_their_own_positions():
    """One more iteration apart moves all that comes behind it."""
    program, now, environment = beside_loops(mixed_loss, MIXED)
    (early, *_) = PrefetchGathers().propose(program, now, environment)
    (kept,) = UnshardStraightLine().propose(program, replace(now, plan=early.plan), environment)
    deeper = kept.plan.replace(loops=choose_schedules(program, prefetch_layers=2, delay_layers=2))
    assert deeper.prefetches == deeper.unsharded == ()
    anew = chosen_anew(program, deeper, replace(now, plan=kept.plan), environment)
    assert len(anew.unsharded) >= len(kept.plan.unsharded)
    assert anew.prefetches
    planned = apply_plan(program, environment.mesh, anew)
    for got, expected in zip(run(planned, environment.mesh), run(program, environment.mesh), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.pure
@pytest.mark.parametrize("proposer", [PrefetchGathers(), UnshardStraightLine(), ReduceInOrder()])
def test_what_surrounds_loops_is_no_matter_of_straight_lines(proposer):
    """Embeddings and heads, and layers where it is loops that wait."""

    def headed_loss(params, x):
        return jnp.mean((run_stack(params["stack"], x) @ params["head"]) ** 2)

    program, now, environment = beside_loops(headed_loss, {"stack": stack_shapes(), "head": (WIDTH, WIDTH)})
    assert list(proposer.propose(program, now, environment)) == []
    program, now, environment = beside_loops(mixed_loss, MIXED)
    waiting = Loop("while", "", 5, True, 1.0, Totals(exposed_s={Stream.ALL_GATHER: 0.2}))
    busy: Any = SimpleNamespace(loops=(waiting,))
    assert list(proposer.propose(program, replace(now, simulation=busy), environment)) == []


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
    nothing: Any = None
    now = Trial(Plan("0"), program, nothing, nothing, nothing, Prediction(1.0, 1.0, 1.0, 1.0, 0), 0)
    environment = Environment(mesh, "cuda", CostModel(), None)
    (found,) = ReduceInOrder(latency_share=1.0).propose(program, now, environment)
    assert found.plan == Plan("0", reduction_bucket_bytes=1 << 20)
    hidden = replace(now, prediction=replace(now.prediction, exposed_s=0.0))
    assert list(ReduceInOrder(latency_share=1.0).propose(program, hidden, environment)) == []
    assert list(ReduceInOrder(latency_share=1e-6).propose(program, now, environment)) == []


@pytest.mark.pure
def test_the_most_seconds_for_the_least_memory_come_first():
    dear, cheap, hidden = Repeat(0, 1.0, 100, 9.0), Repeat(1, 1.0, 100, 1.0), Repeat(2, 0.0, 1, 1.0)
    assert choose_unsharded((dear, cheap, hidden), 150) == (1,)
    assert choose_unsharded((dear, cheap, hidden), 200) == (0, 1)
    assert choose_unsharded((dear, cheap, hidden), 99) == ()


@pytest.mark.pure
def test_a_gather_hides_behind_what_is_computed_since_the_last_collective():
    work, gather = EquationTime(compute_s=1.0), EquationTime(network_s=3.0)
    assert exposed_seconds([gather, work, work, gather, work], [(3, 4)]) == [1.0]
    assert exposed_seconds([work, work, work, work, gather, work], [(4, 5)]) == [0.0]
    assert exposed_seconds([work, gather, gather, work], [(1, 3), (2, 3)]) == [2.0, 3.0]


@pytest.mark.pure
def test_where_memory_may_not_have_the_room_gathers_start_later_otherwise():
    program, now, environment = situation(unrolled_loss, UNROLLED, Clock(gather_s=2.0))
    peak_bytes = memory_of_program(program).live_peak_bytes
    tight = replace(now, prediction=replace(now.prediction, peak_bytes=peak_bytes))
    (roomy, _), (close, _) = (
        list(PrefetchGathers().propose(program, tight, replace(environment, limit_bytes=limit)))
        for limit in (1 << 30, int(1.02 * peak_bytes))
    )
    assert roomy.otherwise is None
    assert close.otherwise is not None
    started, later = (
        {each.gather: each.after for each in plan.prefetches} for plan in (close.plan, close.otherwise.plan)
    )
    assert all(later[gather] >= after for gather, after in started.items())
