"""Of a small program all plans are compiled, scheduled and simulated: the one that is found is as good as the best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.costs.measured import costs_of
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import kernels_once, memory_options
from jax_deepcompile.planner.candidate import Candidate, Environment, compiled, evaluate
from jax_deepcompile.planner.layers import copying_ahead, layer_stacks
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import find_recomputation
from jax_deepcompile.planner.scheduler_latencies import scheduler_latencies
from jax_deepcompile.planner.stacks import saved_stacks, saving
from jax_deepcompile.planner.state_on_host import argument_bytes, host_leaves, with_state_on_host
from jax_deepcompile.planner.strategies.pipeline_loops import PipelineLoops
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.save_gathered import SavedGathers
from tests.partition.steps import shapes, training_step
from tests.transforms.programs import gated_loss, gated_shapes, h100s

pytestmark = [pytest.mark.h100_aot, pytest.mark.slow]

LAYERS, WIDTH, HIDDEN, TOKENS = 6, 1024, 4096, 8192
HOST_BYTES = 100 << 30
WITHIN = 1.02


def training(limit_bytes: int) -> tuple[deepcompile.ShardedStep, tuple]:
    params, optimizer = shapes(gated_shapes(LAYERS, WIDTH, HIDDEN)), optax.sgd(0.1, momentum=0.9)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    step = deepcompile.shard(
        training_step(gated_loss, optimizer), h100s(), memory_limit=limit_bytes, host_memory_limit=HOST_BYTES
    )
    return step, (state, shapes((8 * TOKENS, WIDTH)))


def every_plan(base: Program, environment: Environment, moves_state: bool) -> Iterator[Plan]:
    """Products computed again, kept or on the host; the layer's input here or there; parameters gathered or saved.

    Args:
      moves_state: moments, or parameters as well, are here or there, as a whole or by layer; then no product is kept
        here, and no parameter gathered.
    """
    mesh = environment.mesh
    options = memory_options(
        environment.limit_bytes or 0, argument_bytes(base), environment.costs.hardware.memory_bytes
    )
    start = Plan("").replace(options=kernels_once() | options)
    (pipelined,) = (each.plan for each in PipelineLoops().propose(base, Candidate(start, base), environment))
    gathers = pipelined.program(base, mesh, until=SavedGathers)
    (turn,) = [each for each in find_recomputation(gathers, environment.costs) if each.is_of_loops]
    products = [name for name in turn.names if "dot_general" in name]
    stacks = saved_stacks(base, environment, pipelined, layer_stacks(gathers, pipelined))
    places = [("again", "there") if moves_state else ("again", "here", "there")] * len(products)
    places += [("here", "there"), (False,) if moves_state else (False, True)]
    leaves = list(host_leaves(base))
    moments = [name for name in leaves if "opt_state" in name]
    moved = [[], moments, leaves] if moves_state else [[]]
    for *chosen, given, is_saved, state in itertools.product(*places, moved):
        kept = tuple(name for name, where in zip(products, chosen, strict=True) if where != "again")
        away = tuple(name for name, where in zip(products, chosen, strict=True) if where == "there")
        away += tuple(each.name for each in turn.residuals) * (given == "there")
        plan = pipelined.having(SavedGathers, saving(stacks) if is_saved else [])
        plan = plan.having(KeptActivations, [KeptActivations(*turn.loops, kept)] if kept else [])
        plan = plan.having(OffloadedActivations, [OffloadedActivations(*turn.loops, away)] if away else [])
        for by_layer in (False, True) if state else (False,):
            yield copying_ahead(with_state_on_host(plan, base, state, environment, by_layer), base, mesh)


def fastest_s(candidate: Candidate, environment: Environment) -> float | None:
    """What a step takes, by XLA's own schedule or by what operations take, whichever is faster and fits."""
    plan = candidate.plan.replace(latencies=scheduler_latencies(candidate.simulation))
    scheduled = compiled(candidate.program, candidate.evaluated.lowered, plan, environment)
    return min((each.prediction.step_s for each in (candidate, scheduled) if environment.fits(each)), default=None)


@pytest.mark.parametrize(
    ("share", "moves_state"),
    [(2.0, False), (1.3, False), (0.9, False), (0.45, True)],
    ids=["all fit", "some", "one", "state on the host"],
)
def test_the_plan_is_within_two_percent_of_the_best(share, moves_state):
    step, args = training(64 << 30)
    limit_bytes = int(share * step.plan(*args).prediction.peak_bytes)
    step, args = training(limit_bytes)
    traced = step.trace(*args)
    environment = Environment(h100s(), "cuda", costs_of(h100s(), None), limit_bytes, HOST_BYTES)
    found = {}
    for plan in every_plan(traced.sharded, environment, moves_state):
        seconds = fastest_s(evaluate(traced.sharded, plan, environment), environment)
        if seconds is not None:
            found[seconds] = plan
    assert found, "some plans fit"
    assert traced.plan().prediction.step_s <= WITHIN * min(found), f"the best: {found[min(found)]}"


def test_less_memory_takes_longer_without_a_cliff():
    """Down to where not even a layer's own values fit beside the moments."""
    step, args = training(64 << 30)
    most = step.plan(*args).prediction.peak_bytes
    curve = step.trace(*args).memory_curve([int(share * most) for share in (1.0, 0.85, 0.7, 0.6, 0.55, 0.5, 0.45)])
    seconds = [point.fits.step_s for point in curve if point.fits]
    assert len(seconds) == len(curve)
    assert all(now <= 1.1 * before for before, now in itertools.pairwise(seconds)), seconds
