"""What XLA is told: the truth, but for collectives that share a loop's compute or the network."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_deepcompile import targets
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulation import Event, Loop, Simulation, Totals
from jax_deepcompile.costs.simulator import simulate
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.lowering.compile import combiner_options, compile_options, double_buffering
from jax_deepcompile.lowering.latencies import Latency, latency_options
from jax_deepcompile.planner.scheduler_latencies import scheduler_latencies
from tests.costs.snippets import BODY, COSTS, WHILE, module
from tests.planner.situations import NO_MEMORY


def simulated(compute_s: float, communication_s: float, innermost: bool = True) -> Simulation:
    """Half of the communication in a gather in the loop, and as long a one outside of it."""
    trip = Totals(compute_s=compute_s, communication_s=communication_s)
    loop = Loop("while", "", 4, True, compute_s + communication_s, trip, is_innermost=innermost)
    each_s = communication_s / 2
    events = (
        Event(Stream.COMPUTE, "fusion", 0.0, compute_s, loop="while"),
        Event(Stream.ALL_GATHER, "gather", 0.0, each_s, loop="while"),
        Event(Stream.REDUCE_SCATTER, "outside", 1.0, 1.0 + each_s),
    )
    return Simulation(10.0, Totals(), (loop,), events, NO_MEMORY)


def told(simulation: Simulation, at_a_time: int = 1) -> dict[str, float]:
    return {each.name: each.microseconds / 1e6 for each in scheduler_latencies(simulation, at_a_time)}


@pytest.mark.pure
def test_what_compute_can_cover_is_told_as_it_is():
    assert told(simulated(3.0, 2.0)) == {"fusion": 3.0, "gather": 1.0, "outside": 1.0}


@pytest.mark.pure
def test_a_loop_with_less_compute_than_communication_shares_it_out():
    assert told(simulated(1.0, 4.0)) == {"fusion": 1.0, "gather": 0.5, "outside": 2.0}


@pytest.mark.pure
def test_a_loop_around_other_loops_is_told_as_it_is():
    assert told(simulated(1.0, 4.0, innermost=False)) == {"fusion": 1.0, "gather": 2.0, "outside": 2.0}


@pytest.mark.pure
def test_kernels_of_conditions_take_nothing():
    fused = """%less (p: s32[], q: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %lt = pred[] compare(%p, %q), direction=LT
}
"""
    asking = BODY.replace(
        "ROOT %lt = pred[] compare(%j, %bound), direction=LT",
        "ROOT %asked = pred[] fusion(%j, %bound), kind=kLoop, calls=%less",
    )
    assert told(simulate(module(WHILE, fused, asking), COSTS)) == {"asked": 0.0, "start": 0.5, "copy": 0.5}


@pytest.mark.pure
def test_a_little_less_is_said_of_collectives_only():
    latencies = scheduler_latencies(simulated(3.0, 2.0), scale=0.95)
    assert {each.name: each.microseconds for each in latencies} == {"fusion": 3e6, "gather": 0.95e6, "outside": 0.95e6}


@pytest.mark.pure
def test_two_collectives_at_a_time_share_the_network():
    assert told(simulated(1.0, 4.0), at_a_time=2) == {"fusion": 1.0, "gather": 3.8, "outside": 3.8}


@pytest.mark.pure
def test_loops_without_communication_are_no_trouble():
    assert told(simulated(1.0, 0.0)) == {"fusion": 1.0, "gather": 0.0, "outside": 0.0}


LAYERS, WIDTH, ROWS, DEVICES = 8, 8192, 384, 32


def pipelined(x, shards):
    """Layers of eight products; beside them the next parameter is gathered and the last gradient reduced."""

    def trip(carry, shard):
        x, whole, gradient = carry
        ahead = lax.all_gather(shard, "fsdp", tiled=True)
        reduced = lax.psum_scatter(gradient, "fsdp", tiled=True)
        y = x
        for _ in range(8):
            y = jnp.tanh(y @ whole)
        return (y, ahead, y.T @ x), reduced

    whole = lax.all_gather(shards[0], "fsdp", tiled=True)
    (y, _, _), reduced = lax.scan(trip, (x, whole, whole), shards)
    return y, reduced


@pytest.mark.h100_aot
def test_the_network_is_never_idle_in_a_loop_that_waits_for_it():
    mesh = targets.h100(nodes=4).make_mesh((DEVICES,), ("fsdp",))
    specs = (P("fsdp"), P(None, "fsdp"))
    step = jax.shard_map(pipelined, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    shapes = ((ROWS * DEVICES, WIDTH), (LAYERS, WIDTH, WIDTH))
    traced = jax.jit(step).trace(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    lowered = traced.lower(lowering_platforms=("cuda",))
    options = compile_options("cuda") | double_buffering() | combiner_options(1 << 30, 1 << 30)

    def played(latencies: tuple[Latency, ...] = ()) -> Simulation:
        compiled = lowered.compile(compiler_options=options | latency_options(latencies))
        return simulate(read(compiled.as_text() or ""), CostModel())

    def idle(simulation: Simulation) -> float:
        (loop,) = simulation.loops
        assert loop.trip.communication_s > loop.trip.compute_s
        return loop.hideable_s / loop.trip_s

    untold = played()
    true = tuple(Latency(each.name, 1e6 * (each.end_s - each.start_s)) for each in untold.timeline)
    assert idle(played(scheduler_latencies(untold))) < 0.001 < idle(played(true)) < idle(untold)
