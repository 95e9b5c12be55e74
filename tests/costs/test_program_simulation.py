"""Programs by hand: memory 1 MB/s, collectives 100 kB/s, copies 100 kB/s to the host and 50 kB/s from it."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.random import threefry2x32_p

import jax_deepcompile as deepcompile
from experiments.bench.steps import llama_gradients, training_step
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.costs.combining import Thresholds
from jax_deepcompile.costs.program_simulation import simulate_program
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.costs.streams import Queue, Stream
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.program import Port, Program, Role, View
from models import llama
from tests.cases import examples
from tests.costs.snippets import COSTS

pure = pytest.mark.pure

AXIS = "fsdp"
WORK = (125_000,)
"""A kernel that reads and writes so many bytes takes a quarter of a second."""
SHARD = (25_000,)
"""Gathered from four devices: 100 kB, 0.75 s."""
ALONE = Thresholds(0, 0, 0)


def program(fun, *shapes, donated=(), dtype=jnp.int8) -> Program:
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    closed = jax.make_jaxpr(fun, axis_env=[(AXIS, 4)])(*arguments)
    flat = open_jaxpr(closed)
    inputs, outputs = (
        tuple(Port(str(at), Role.OTHER, var.aval.shape, str(var.aval.dtype)) for at, var in enumerate(variables))
        for variables in (flat.invars, flat.outvars)
    )
    return Program(
        "test",
        closed,
        inputs,
        outputs,
        jax.tree.structure([*outputs]),
        tuple(donated),
        MeshAxes((AXIS,), (4,)),
        View.LOCAL,
    )


def played(fun, *shapes, thresholds=ALONE, **kwargs):
    return simulate_program(program(fun, *shapes, **kwargs), COSTS, thresholds)


def gather(shard):
    return lax.all_gather(shard, AXIS, tiled=True)


def kernel(x):
    """One that is not fused with another, whatever reads it: a quarter of a second for ``WORK``."""
    return lax.rev(x, (0,))


def work(x, times=1):
    """A quarter of a second each."""
    for _ in range(times):
        x = lax.optimization_barrier(kernel(x))
    return x


def figures(run):
    return run.step_s, run.compute_s, run.communication_s, run.exposed_communication_s


@pure
def test_a_gather_that_nothing_hides():
    run = played(lambda w: kernel(gather(w)), SHARD)
    assert figures(run) == pytest.approx((0.95, 0.2, 0.75, 0.75))
    assert (run.gathered_bytes, run.reduced_bytes, run.sent_bytes) == (100_000, 0, 75_000)
    assert [(event.stream, event.name, event.kind) for event in run.timeline] == [
        (Stream.ALL_GATHER, "all_gather.0", "all-gather"),
        (Stream.COMPUTE, "rev.1", "rev"),
    ]
    assert all("test_program_simulation.py:" in event.source for event in run.timeline)


@pure
def test_a_gather_runs_beside_work_that_does_not_need_it():
    def fun(w, x):
        done = work(x, 2)
        return done, kernel(gather(w))

    assert figures(played(fun, SHARD, WORK)) == pytest.approx((0.95, 0.7, 0.75, 0.25))


@pure
def test_a_chain_hides_nothing():
    run = played(lambda w: lax.psum_scatter(kernel(gather(w)), AXIS, tiled=True), SHARD)
    assert figures(run) == pytest.approx((1.7, 0.2, 1.5, 1.5))
    assert run.reduced_bytes == 100_000


@pure
def test_what_a_barrier_holds_back_waits_for_all_of_it():
    def fun(w, x):
        held, done = lax.optimization_barrier((w, kernel(x)))
        return kernel(gather(held)), done

    assert figures(played(fun, SHARD, WORK)) == pytest.approx((1.2, 0.45, 0.75, 0.75))


@pure
def test_permutations_run_beside_other_collectives_and_those_one_after_another():
    def permuted(x):
        return lax.ppermute(x, AXIS, [(0, 1), (1, 2), (2, 3), (3, 0)])

    assert figures(played(lambda w, x: (gather(w), permuted(x)), SHARD, (50_000,))) == pytest.approx(
        (0.75, 0.0, 1.25, 0.75)
    )
    assert played(lambda v, w: (gather(v), gather(w)), SHARD, SHARD).step_s == pytest.approx(1.5)


@pure
def test_what_is_fused_waits_at_the_end_of_its_kernel():
    """``(x + 1) * y`` is one kernel, which reads ``x`` and the 100 kB that are gathered, and writes as much."""
    run = played(lambda w, x, y: (kernel(y), (x + jnp.int8(1)) * gather(w)), SHARD, (100_000,), WORK)
    assert figures(run) == pytest.approx((1.05, 0.55, 0.75, 0.5))
    assert [event.name for event in run.timeline if event.stream is Stream.COMPUTE] == ["rev.0", "mul.3"]


@pure
def test_a_scan_is_its_trip_times_its_length():
    def fun(x, stack):
        return lax.scan(lambda x, w: (work(x), kernel(gather(w))), x, stack)

    run = played(fun, WORK, (10, *SHARD))
    assert figures(run) == pytest.approx((9.5, 4.5, 7.5, 5.0))
    (loop,) = run.loops
    assert (loop.name, loop.trip_count, loop.is_counted, loop.trip_s) == ("scan.0", 10, True, pytest.approx(0.95))
    assert {event.trips for event in run.timeline} == {10}
    assert run.gathered_bytes == 1_000_000


@pure
@pytest.mark.parametrize("trips", [1, 2, 3, 100])
def test_what_a_trip_carries_unread_overlaps_the_next(trips: int):
    """Each trip's gather, for the next, takes longer than its work: after the first they follow without a gap."""

    def fun(x, first, stack):
        def body(carry, w):
            x, whole = carry
            return (work(x, 2), gather(w)), kernel(whole)

        return lax.scan(body, (x, gather(first)), stack)

    assert figures(played(fun, WORK, SHARD, (trips, *SHARD))) == pytest.approx(
        (0.75 * (trips + 1), 0.7 * trips, 0.75 * (trips + 1), 0.75 * (trips + 1) - 0.7 * trips)
    )


@pure
def test_a_scan_within_a_scan():
    def inner(x, stack):
        return lax.scan(lambda x, w: (work(x), kernel(gather(w))), x, stack)

    run = played(lambda x, stacks: lax.scan(inner, x, stacks), WORK, (3, 10, *SHARD))
    assert figures(run) == pytest.approx((28.5, 13.5, 22.5, 15.0))
    assert [(loop.name, loop.trip_count) for loop in run.loops] == [("scan.0/scan.0", 10), ("scan.0", 3)]
    assert {event.trips for event in run.timeline} == {30}


@pure
@pytest.mark.parametrize(("hides", "trips", "counted"), [(False, 10, True), (True, 10, True), (None, 1, False)])
def test_a_while_runs_as_often_as_its_condition_tells(hides, trips, counted):
    def fun(x, limit):
        bound = limit[0].astype(jnp.int32) if hides is None else jnp.int32(10)
        bound = lax.optimization_barrier(bound) if hides else bound
        return lax.while_loop(lambda state: state[0] < bound, lambda state: (state[0] + 1, work(state[1])), (0, x))

    run = played(fun, WORK, (1,))
    assert run.step_s == pytest.approx(0.25 * trips, abs=1e-3)
    assert [(loop.trip_count, loop.is_counted) for loop in run.loops] == [(trips, counted)]


@pure
def test_a_branch_is_the_one_that_takes_longest():
    run = played(lambda x: lax.cond(x[0] > 0, lambda: work(x, 1), lambda: work(x, 3)), WORK)
    assert run.step_s == pytest.approx(0.75, abs=1e-3)
    assert sum(event.kind == "rev" for event in run.timeline) == 3


@pure
def test_calls_are_played_in_place():
    run = played(lambda w, x: jax.jit(lambda w, x: (work(x), kernel(gather(w))))(w, x), SHARD, WORK)
    assert figures(run) == pytest.approx((0.95, 0.45, 0.75, 0.5))


@pure
def test_copies_to_and_from_the_host_have_streams_of_their_own():
    def fun(x, y):
        kept = jax.device_put(x, jax.memory.Space.Host)
        more = jax.device_put(kept, jax.memory.Space.Device)
        return work(x, 2), kernel(more), jax.device_put(y, jax.memory.Space.Host)

    run = played(fun, WORK, WORK)
    assert (run.step_s, run.copy_s, run.exposed_copy_s) == pytest.approx((4.0, 5.0, 3.25))
    began_s = {(event.stream, event.start_s) for event in run.timeline if event.stream.is_copy}
    assert began_s == {(Stream.TO_HOST, 0.0), (Stream.TO_HOST, 1.25), (Stream.FROM_HOST, 1.25)}
    assert run.memory.host_bytes == 250_000


@pure
def test_a_wait_for_a_gather_behind_a_copy_counts_as_both():
    run = played(
        lambda w: gather(jax.device_put(jax.device_put(w, jax.memory.Space.Host), jax.memory.Space.Device)), SHARD
    )
    assert (run.step_s, run.exposed_copy_s, run.exposed_communication_s) == pytest.approx((1.5, 0.75, 0.75))


@pure
def test_matrix_products_run_at_the_rate_of_their_type():
    def product(dtype):
        return played(lambda x: x @ x, (1000, 1000), dtype=dtype).compute_s

    assert product(jnp.bfloat16) == pytest.approx(6.0)
    assert product(jnp.float32) == pytest.approx(20.0)


@pure
def test_random_bits_take_longer_than_what_they_are_kept_in():
    def dropped(x, seed):
        bits, _ = threefry2x32_p.bind(*[jnp.broadcast_to(seed, x.shape)] * 2, x, x)
        return jnp.where(bits < 7, x, 0)

    costs = dataclasses.replace(COSTS, hardware=dataclasses.replace(COSTS.hardware, vector_flops_per_s=1e6))
    closed = jax.make_jaxpr(dropped)(*(jax.ShapeDtypeStruct(shape, jnp.uint32) for shape in ((1000,), ())))
    seconds = [each.compute_s for each in equation_times(closed, MeshAxes((AXIS,), (4,)), costs)]
    assert max(seconds) == pytest.approx(0.3)
    assert sum(seconds) < 0.35


@pure
def test_collectives_that_xla_combines_are_launched_once():
    costs = dataclasses.replace(COSTS, network=dataclasses.replace(COSTS.network, launch_s=0.1))

    def communication_s(fun, bytes_: int) -> float:
        return simulate_program(program(fun, SHARD, SHARD), costs, Thresholds(bytes_, bytes_, bytes_)).communication_s

    def apart(v, w):
        return gather(v), gather(w)

    def dependent(v, w):
        return gather(lax.psum_scatter(kernel(gather(v)), AXIS, tiled=True)), w

    assert communication_s(apart, 200_000) == pytest.approx(1.6)
    assert communication_s(apart, 199_999) == pytest.approx(1.7)
    assert communication_s(dependent, 10**6) == pytest.approx(2.55)


@pure
def test_live_bytes_of_arguments_temporaries_and_results():
    run = played(lambda x: work(x, 2), (1000,))
    assert run.memory.names == ("rev.0", "optimization_barrier.1", "rev.2", "optimization_barrier.3")
    assert run.memory.live_bytes == (3000, 3000, 3000, 2000)
    assert (run.memory.argument_bytes, run.memory.output_bytes, run.memory.temporary_bytes) == (1000, 1000, 1000)
    assert run.memory.peak_values == ((1000, "rev.0"),)


@pure
def test_a_donated_argument_and_its_result_share_a_buffer_once_the_argument_is_dead():
    assert played(lambda x: work(x, 2), (1000,), donated=[(0, 0)]).memory.live_bytes == (2000, 2000, 2000, 1000)

    def reads_later(x):
        return work(x), kernel(x)

    run = played(reads_later, (1000,), donated=[(0, 0)])
    assert run.memory.names == ("rev.0", "optimization_barrier.1", "rev.2")
    assert run.memory.live_bytes == (3000, 3000, 2000)


@pure
def test_a_gathered_value_lives_until_it_is_last_read():
    run = played(lambda w, x: (kernel(gather(w)), work(x)), (1000,), (500,))
    assert run.memory.names[:2] == ("all_gather.0", "rev.1")
    assert [size - run.memory.live_bytes[-1] for size in run.memory.live_bytes] == [4000, 4000, 0, 0]


@pure
def test_what_is_fused_away_takes_no_memory_and_what_dies_is_written_over():
    run = played(lambda x: kernel(work(x) * jnp.int8(3) + jnp.int8(1)), (1000,))
    assert run.memory.temporary_bytes == 1000
    over = played(lambda x: (lambda y: work(y - jnp.int8(1)))(work(x)), (1000,))
    assert over.memory.temporary_bytes == 1000


@pure
def test_a_loop_holds_its_stacks_its_carry_and_one_trip():
    def fun(x, stack):
        return lax.scan(lambda x, w: (work(x), kernel(gather(w))), work(x), stack)

    run = played(fun, (1000,), (10, 100))
    # x, the stack, both results; in the loop a gathered slice, and a trip's result before it is stacked.
    outside = 1000 + 1000 + 1000 + 4000
    assert run.memory.argument_bytes + run.memory.output_bytes == outside
    assert run.memory.temporary_bytes <= 1000 + 400 + 400


OPERATIONS = ("work", "gather", "scatter", "permute", "to host", "from host", "barrier")
steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5), st.integers(0, 5)), max_size=7)
LENGTH = (20_000,)


def apply_steps(chosen, values: list) -> list:
    """Runs operations on earlier values, which all are of one shape."""
    values = list(values)
    for operation, first, second in chosen:
        x, y = values[first % len(values)], values[second % len(values)]
        if operation == "work":
            values.append(work(x) * kernel(y))
        elif operation == "gather":
            values.append(lax.slice(gather(x), (0,), LENGTH))
        elif operation == "scatter":
            values.append(jnp.tile(lax.psum_scatter(x, AXIS, tiled=True), 4))
        elif operation == "permute":
            values.append(lax.ppermute(x, AXIS, [(0, 1), (1, 0)]))
        elif operation == "barrier":
            values += lax.optimization_barrier((x, y))
        else:
            host = jax.device_put(x, jax.memory.Space.Host)
            values.append(jax.device_put(host, jax.memory.Space.Device) if operation == "from host" else x)
    return values


def stepwise(chosen):
    return lambda x: tuple(apply_steps(chosen, [x]))


def looped(chosen, trips: int):
    def fun(x):
        def body(carry, _):
            made = apply_steps(chosen, list(carry))
            return tuple(made[-3:]), None

        return lax.scan(body, (x, work(x), kernel(x)), None, length=trips)[0]

    return fun


def check_bounds(run):
    busy = [
        sum(event.trips * (event.end_s - event.start_s) for event in run.timeline if event.stream.queue is queue)
        for queue in Queue
    ]
    assert sum(busy) == pytest.approx(run.compute_s + run.communication_s + run.copy_s)
    assert max(busy) <= run.step_s * (1 + 1e-9) + 1e-9
    assert run.step_s <= sum(busy) * (1 + 1e-9) + 1e-9
    exposed_s = run.exposed_communication_s + run.exposed_copy_s
    assert run.step_s == pytest.approx(run.compute_s + exposed_s)
    for queue in Queue:
        events = [event for event in run.timeline if event.stream.queue is queue]
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(events))


@pure
@examples(40)
@given(steps)
def test_a_step_takes_at_least_its_busiest_stream_and_at_most_all_of_them(chosen):
    check_bounds(played(stepwise(chosen), LENGTH))


@pure
@examples(40)
@given(steps, st.sampled_from([1, 2, 3, 7, 40]))
def test_a_loop_takes_at_least_its_busiest_stream_and_at_most_all_of_them(chosen, trips):
    check_bounds(played(looped(chosen, trips), LENGTH))


@pure
@examples(30)
@given(steps, steps)
def test_more_work_never_shortens_a_step(chosen, more):
    alone = played(stepwise(chosen), LENGTH)
    longer = played(lambda x, y: (stepwise(chosen)(x), stepwise(more)(y)), LENGTH, LENGTH)
    assert longer.step_s >= alone.step_s - 1e-9


def llama_step(mesh, config, tokens: int):
    gradients, state = llama_gradients(config, by_hand=False)
    step = deepcompile.shard(training_step(gradients), mesh, passes=())
    return step.trace(state, jax.ShapeDtypeStruct((mesh.size, tokens + 1), jnp.int32))


@pure
def test_a_traced_step_is_simulated_without_compiling_it():
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    run = deepcompile.simulate(llama_step(mesh, llama.LLAMA_TINY, 16), mesh)
    assert [loop.trip_count for loop in run.loops] == [llama.LLAMA_TINY.n_layers] * 2
    assert run.bound_s <= run.step_s
    assert run.gathered_bytes > run.reduced_bytes > 0


@pytest.mark.h100_aot
def test_a_program_takes_what_xla_makes_of_it():
    """Llama-3-8B on 32 H100s, from its program and from what XLA:GPU compiles of it."""
    mesh = deepcompile.targets.h100(nodes=4).make_mesh((32,), (AXIS,))
    traced = llama_step(mesh, llama.LLAMA3_8B, 2048)
    before, after = deepcompile.simulate(traced, mesh), deepcompile.simulate(traced.lower().compile(), mesh)
    assert (before.gathered_bytes, before.reduced_bytes) == (after.gathered_bytes, after.reduced_bytes)
    assert before.communication_s == pytest.approx(after.communication_s, rel=0.1)
    assert before.compute_s == pytest.approx(after.compute_s, rel=0.25)
    assert before.step_s == pytest.approx(after.step_s, rel=0.25)
    assert before.peak_bytes == pytest.approx(after.peak_bytes, rel=0.25)
    assert np.isclose(before.step_s, before.compute_s + before.exposed_communication_s)
