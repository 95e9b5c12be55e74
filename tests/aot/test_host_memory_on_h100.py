"""State on the host, and layers computed again, compiled for H100s: what a device and its host hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from jax_deepcompile.costs.simulator import Simulation
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.lowering.compile import host_bytes, peak_bytes
from jax_deepcompile.planner.layers import copying_ahead
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.offload_parameters import OffloadedParameters, streamable
from jax_deepcompile.transforms.offload_state import OffloadedState, movable
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments
from tests.partition.steps import shapes, training_step
from tests.schedules import kernels_beside_copies, loop_bodies, products_beside_copies
from tests.transforms.programs import h100s

pytestmark = pytest.mark.h100_aot

GPUS, MATRICES, WIDTH = 8, 16, 4096
LEAF_BYTES = 4 * WIDTH * WIDTH // GPUS
MOMENT_BYTES = 2 * MATRICES * LEAF_BYTES


def adamw(loss, sizes: Any, **options: Any) -> tuple[deepcompile.ShardedStep, Any]:
    """A step for H100s, and shapes of its state."""
    optimizer, params = optax.adamw(1e-3), shapes(sizes)
    step = deepcompile.shard(training_step(loss, optimizer), h100s(), **options)
    return step, {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}


class Compiled(NamedTuple):
    memory: Any
    simulation: Simulation


@pytest.fixture(scope="module")
def here_and_away() -> tuple[Compiled, Compiled]:
    """A step with few rows and large matrices: all state on the device, and all moments on the host."""

    def loss(params, x):
        for index in range(MATRICES):
            x = jnp.tanh(x @ params[f"w{index}"])
        return jnp.mean(x**2)

    sizes = {f"w{index}": (WIDTH, WIDTH) for index in range(MATRICES)}
    step, state = adamw(loss, sizes, passes=())
    known = movable(step.trace(state, shapes((64, WIDTH))).sharded).values()
    leaves = tuple(name for name in known if "opt_state" in name)
    assert len(leaves) == 2 * MATRICES

    def compiled(step: deepcompile.ShardedStep) -> Compiled:
        found = step.trace(state, shapes((64, WIDTH))).lower().compile()
        return Compiled(found.memory_analysis(), deepcompile.simulate(found, step.mesh))

    return compiled(step), compiled(step.reshard(plan=Plan("", (OffloadedState(leaves),))))


def test_the_host_has_the_moments_and_updates_them_in_place(here_and_away):
    here, away = (each.memory for each in here_and_away)
    assert here.host_argument_size_in_bytes == 0
    assert away.host_argument_size_in_bytes == MOMENT_BYTES
    assert away.host_alias_size_in_bytes == away.host_output_size_in_bytes == MOMENT_BYTES
    assert away.host_temp_size_in_bytes == 0
    assert here.argument_size_in_bytes - away.argument_size_in_bytes == MOMENT_BYTES


def test_the_device_has_a_few_of_them_at_a_time(here_and_away):
    here, away = (peak_bytes(each.memory) for each in here_and_away)
    assert away - (here - MOMENT_BYTES) <= 10 * LEAF_BYTES


def test_copies_run_both_ways_at_once(here_and_away):
    """While they run there is little to compute: what is not waited for is hidden by copies the other way."""
    simulation = here_and_away[1].simulation
    assert simulation.exposed_copy_s + simulation.compute_s < simulation.copy_s


LAYERS, FEATURES, ROWS = 8, 2048, 8192
LIMIT = 1900 << 20


def plain_layers(params, x):
    """Written without checkpoint, it takes 6 GiB."""
    return jnp.mean(lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, params)[0] ** 2)


def unrolled_layers(params, x):
    """The same, layer by layer."""
    for at in range(LAYERS):
        w = params[f"layer{at}"]
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


def planned(passes, loss=plain_layers, **limits) -> tuple[deepcompile.ShardedStep, Any, Any]:
    sizes: Any = {"up": (FEATURES, 4 * FEATURES), "down": (4 * FEATURES, FEATURES)}
    if loss is plain_layers:
        sizes = {name: (LAYERS, *size) for name, size in sizes.items()}
    else:
        sizes = {f"layer{at}": sizes for at in range(LAYERS)}
    step, state = adamw(loss, sizes, passes=passes, **({"memory_limit": LIMIT} | limits))
    return step, state, shapes((GPUS * ROWS, FEATURES))


PASSES = (deepcompile.PipelineLoops(), deepcompile.KeepActivations())


@pytest.mark.parametrize(
    ("loss", "again", "limit"),
    [
        pytest.param(plain_layers, Rematerialized, LIMIT, marks=pytest.mark.slow),
        (unrolled_layers, RematerializedSegments, 2500 << 20),
    ],
)
def test_what_does_not_fit_as_it_is_written_is_computed_again_and_is_as_predicted(loss, again, limit):
    step, state, batch = planned(PASSES, loss, memory_limit=limit)
    traced = step.trace(state, batch)
    plan = traced.plan()
    memory = traced.lower().compile().memory_analysis()
    assert plan.of(again)
    assert plan.prediction is not None
    assert peak_bytes(memory) <= limit
    assert peak_bytes(memory) == pytest.approx(plan.prediction.peak_bytes, rel=0.03)
    assert host_bytes(memory) == pytest.approx(plan.prediction.host_bytes, rel=0.03)
    assert f"of {limit / 2**30:.2f} GiB" in traced.explain()


@pytest.mark.slow
def test_without_that_it_takes_longer():
    seconds = []
    for passes in ("-rematerialize", None):
        step, *args = planned(passes)
        seconds.append(step.plan(*args).prediction.step_s)
    assert seconds[0] > 1.1 * seconds[1]


def test_what_is_refused_says_which_limits_would_do():
    step, *args = planned(PASSES, host_memory_limit=0)
    with pytest.raises(
        errors.MemoryExceededError, match=r'raise memory_limit to ".*GiB", or host_memory_limit'
    ) as said:
        step.plan(*args)
    needed = said.value
    assert step.reshard(memory_limit=needed.needed_bytes).plan(*args).prediction.host_bytes == 0
    plan = step.reshard(host_memory_limit=needed.host_bytes).plan(*args)
    assert 0 < plan.prediction.host_bytes <= needed.host_bytes
    away = {type(each) for each in plan.decisions if each.on_host}
    for kind in away:
        here = (
            step.reshard(memory_limit=None, host_memory_limit=None, plan=plan.without(kind))
            .trace(*args)
            .lower()
            .compile()
        )
        assert peak_bytes(here.memory_analysis()) > plan.prediction.peak_bytes, f"{kind.kind} saves nothing"
    with pytest.raises(errors.HostMemoryExceededError, match=r"more than the limit of 10\.00 MiB"):
        step.reshard(host_memory_limit="10MiB", plan=plan).plan(*args)


def test_parameters_on_the_host_come_a_layer_at_a_time_beside_products():
    step, state, batch = planned((), memory_limit=None)
    program = step.trace(state, batch).sharded
    parameters, leaves = tuple(streamable(program).values()), tuple(movable(program).values())
    plan = Plan("", (OffloadedParameters(parameters), OffloadedState(leaves, by_layer=True)))
    plan = copying_ahead(plan, program, h100s())
    compiled = step.reshard(plan=plan).trace(state, batch).lower().compile()
    memory = compiled.memory_analysis()
    shard_bytes = 2 * 4 * LAYERS * FEATURES * 4 * FEATURES // GPUS
    assert len(parameters) == 2
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == 3 * shard_bytes
    assert memory.argument_size_in_bytes < shard_bytes
    bodies = loop_bodies(read(compiled.as_text()))
    forward, backward = (beside for body in bodies if any(beside := products_beside_copies(body)))
    assert min(*forward, *backward) >= 1
    (updates,) = (kernels_beside_copies(body) for body in bodies if not any(products_beside_copies(body)))
    assert sum(map(bool, updates)) >= len(updates) / 2, "one leaf is updated while the next comes in"
    update = next(loop.trip for loop in deepcompile.simulate(compiled, h100s()).loops if not loop.trip.gathered_bytes)
    assert memory.host_temp_size_in_bytes == 0
    assert update.exposed_copy_s + update.compute_s < 0.75 * update.copy_s, "copies run both ways at once"
