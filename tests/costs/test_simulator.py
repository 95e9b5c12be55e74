"""Streams, by hand: device memory 1 MB/s, collectives 100 kB/s, copies 100 kB/s to the host and 50 kB/s from it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jax_deepcompile import errors
from jax_deepcompile.costs.simulation import Wait
from jax_deepcompile.costs.simulator import simulate
from jax_deepcompile.costs.streams import Queue, Stream
from jax_deepcompile.hlo import opcodes
from jax_deepcompile.hlo import reader as hlo
from tests.costs.snippets import (
    ADDER,
    BODY,
    COSTS,
    DONE,
    GATHER,
    GROUPS,
    START,
    WHILE,
    WORK,
    leaving_a_gather_for_the_next_trip,
    module,
)

pytestmark = pytest.mark.pure


def test_an_exposed_gather():
    run = simulate(module(f"{GATHER}{START}\n{DONE}\n{WORK}"), COSTS)
    assert (run.step_s, run.compute_s) == pytest.approx((1.25, 0.5))
    assert (run.communication_s, run.exposed_communication_s) == pytest.approx((0.75, 0.75))
    assert (run.gathered_bytes, run.reduced_bytes) == (100_000, 0)
    assert run.bound_s == pytest.approx(0.75)


def test_a_gather_half_hidden():
    run = simulate(module(f"{GATHER}{START}\n{WORK}\n{DONE}"), COSTS)
    assert (run.step_s, run.exposed_communication_s) == pytest.approx((0.75, 0.25))
    assert [(event.stream, event.name, event.start_s) for event in run.timeline] == [
        (Stream.ALL_GATHER, "start", 0.0),
        (Stream.COMPUTE, "copy", 0.0),
    ]
    assert run.waits == (Wait(Stream.ALL_GATHER, "start", "", "", 0.5, 0.25),)


def test_what_is_hidden_is_not_waited_for():
    assert simulate(module(f"{GATHER}{START}\n{WORK}\n{WORK.replace('copy', 'b', 1)}\n{DONE}"), COSTS).waits == ()


def test_a_synchronous_gather_is_exposed():
    gather = f"%done = f32[25000]{{0}} all-gather(%w), {GROUPS}, dimensions={{0}}"
    run = simulate(module(f"{GATHER}{gather}\n{WORK}"), COSTS)
    assert (run.step_s, run.exposed_communication_s) == pytest.approx((1.25, 0.75))


def test_a_start_that_xla_runs_synchronously_is_exposed():
    sync = f'{START}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}'
    run = simulate(module(f"{GATHER}{sync}\n{WORK}\n{DONE}"), COSTS)
    assert (run.step_s, run.exposed_communication_s) == pytest.approx((1.25, 0.75))


def test_collectives_follow_one_another_on_one_stream():
    second = "%b = ((f32[6250]{0}), (f32[25000]{0})) all-gather-start(%w), replica_groups=[1,4]<=[4], dimensions={0}"
    run = simulate(module(f"{GATHER}{START}\n{second}\n{DONE}\n%d = f32[25000]{{0}} all-gather-done(%b)"), COSTS)
    assert (run.step_s, run.exposed_communication_s) == pytest.approx((1.5, 1.5))


def test_waits_are_told_apart_by_kind():
    """A reduce-scatter of 0.75 s waits for the gather before it, beside 0.5 s of work; then nothing hides it."""
    scatter = f"%reduced = f32[6250]{{0}} reduce-scatter(%done), {GROUPS}, dimensions={{0}}, to_apply=%adder"
    run = simulate(module(f"{GATHER}{START}\n{WORK}\n{DONE}\n{scatter}", ADDER), COSTS)
    assert run.totals.exposed_s == pytest.approx({Stream.ALL_GATHER: 0.25, Stream.REDUCE_SCATTER: 0.75})
    assert run.exposed_communication_s == pytest.approx(1.0)
    assert "exposed communication 1.000 of 1.500 (all-gather 0.250, reduce-scatter 0.750)" in str(run)


def test_every_collective_has_a_stream():
    assert {stream.value for stream in Stream if stream.queue in (Queue.NETWORK, Queue.PEERS)} == opcodes.COLLECTIVES


def test_a_wrapped_reduce_scatter_is_a_reduce_scatter():
    wrapped = f"""%wrapped (p: f32[25000]) -> f32[6250] {{
  %p = f32[25000]{{0}} parameter(0)
  ROOT %scatter = f32[6250]{{0}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%adder
}}
"""
    entry = """
%g = f32[25000]{0} parameter(0)
%s = ((f32[25000]{0}), f32[6250]{0}) async-start(%g), calls=%wrapped
%u = ((f32[25000]{0}), f32[6250]{0}) async-update(%s)
%d = f32[6250]{0} async-done(%u)
"""
    run = simulate(module(entry, ADDER, wrapped), COSTS)
    assert (run.step_s, run.reduced_bytes) == (pytest.approx(0.75), 100_000)


def test_copies_to_and_from_the_host_have_streams_of_their_own():
    entry = """
%x = f32[12500]{0} parameter(0)
%y = f32[12500]{0:S(5)} parameter(1)
%out = (f32[12500]{0:S(5)}, f32[12500]{0}, u32[]) copy-start(%x)
%in = (f32[12500]{0}, f32[12500]{0:S(5)}, u32[]) copy-start(%y)
%out-done = f32[12500]{0:S(5)} copy-done(%out)
%in-done = f32[12500]{0} copy-done(%in)
"""
    run = simulate(module(entry), COSTS)
    assert (run.step_s, run.copy_s, run.exposed_copy_s) == pytest.approx((1.0, 1.5, 1.0))
    assert {event.stream for event in run.timeline} == {Stream.TO_HOST, Stream.FROM_HOST}


def test_a_loop_is_its_trip_times_its_count():
    run = simulate(module(WHILE, BODY), COSTS)
    assert (run.step_s, run.compute_s, run.exposed_communication_s) == pytest.approx((7.5, 5.0, 2.5))
    (loop,) = run.loops
    assert (loop.trip_count, loop.is_counted) == (10, True)
    assert (loop.trip_s, loop.trip.compute_s, loop.trip.exposed_communication_s) == pytest.approx((0.75, 0.5, 0.25))
    assert {event.trips for event in run.timeline} == {10}
    assert run.gathered_bytes == 1_000_000
    assert (loop.began_s, loop.shown_s, loop.parent) == (0.0, 0.0, "")
    assert run.waits == (Wait(Stream.ALL_GATHER, "start", "", "", 0.5, 0.25, 10, "loop"),)


def test_what_was_under_way_before_a_loop_delays_its_first_trip_alone():
    early = f"%early = (f32[25000]{{0}}, f32[100000]{{0}}) all-gather-start(%wide), {GROUPS}, dimensions={{0}}"
    entry = f"%wide = f32[25000]{{0}} parameter(1)\n{early}{WHILE}%late = f32[100000]{{0}} all-gather-done(%early)"
    run = simulate(module(entry, BODY), COSTS)
    assert run.step_s == pytest.approx(3.0 + 10 * 0.75)
    assert run.loops[0].trip_s == pytest.approx(0.75)
    assert run.exposed_communication_s == pytest.approx(run.step_s - 10 * 0.5)
    assert (run.loops[0].began_s, run.loops[0].shown_s) == pytest.approx((0.0, 3.75))
    assert max(event.end_s for event in run.unrolled()) == pytest.approx(run.step_s)


def test_what_a_loop_runs_synchronously_counts_once_in_its_bound():
    sync = f'{START}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}'
    run = simulate(module(WHILE, BODY.replace(START, sync)), COSTS)
    assert (run.step_s, run.communication_s, run.bound_s) == pytest.approx((12.5, 7.5, 7.5))


def test_a_loop_without_a_count_runs_once_and_says_so():
    run = simulate(module(WHILE, BODY.replace("direction=LT", "direction=NE")), COSTS)
    assert (run.loops[0].trip_count, run.loops[0].is_counted) == (1, False)


def test_a_gather_that_a_trip_leaves_for_the_next():
    run = simulate(leaving_a_gather_for_the_next_trip(), COSTS)
    assert run.loops[0].trip_s == pytest.approx(0.75)
    assert (run.step_s, run.compute_s, run.communication_s) == pytest.approx((3.0, 1.5, 3.0))
    assert run.exposed_communication_s == pytest.approx(1.5)
    assert (run.loops[0].began_s, run.loops[0].shown_s) == pytest.approx((0.0, 1.25))
    in_loop, after = run.waits
    assert (in_loop.loop, in_loop.name, in_loop.trips, in_loop.start_s) == ("loop", "start", 3, pytest.approx(1.25))
    assert (after.loop, after.name, after.end_s) == ("", "start", pytest.approx(3.0))


@pytest.mark.parametrize(
    "played", [module(WHILE, BODY), leaving_a_gather_for_the_next_trip()], ids=["alike", "carried"]
)
def test_unrolled_all_trips_of_a_loop_are_there_and_last_as_long(played: hlo.Module):
    run = simulate(played, COSTS)
    events = list(run.unrolled())
    in_all = {event.name: [each for each in events if each.name == event.name] for event in run.timeline}
    assert {name: len(each) for name, each in in_all.items()} == {
        name: sum(event.trips for event in run.timeline if event.name == name) for name in in_all
    }
    assert {event.trips for event in events} == {1}
    assert max(event.end_s for event in events) == pytest.approx(run.step_s)
    kernels = [event for event in events if event.stream is Stream.COMPUTE]
    gathers = [event for event in events if event.stream is not Stream.COMPUTE]
    for each, seconds in ((kernels, run.compute_s), (gathers, run.communication_s)):
        assert sum(event.end_s - event.start_s for event in each) == pytest.approx(seconds)
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in pairwise(each))


def test_a_conditional_costs_its_dearer_branch():
    branch = """%{name} (p: f32[62500]) -> f32[62500] {{
  %p_{name} = f32[62500]{{0}} parameter(0)
  ROOT %r_{name} = f32[{size}]{{0}} copy(%p_{name})
}}
"""
    entry = """
%x = f32[62500]{0} parameter(0)
%which = pred[] parameter(1)
%c = f32[62500]{0} conditional(%which, %x, %x), true_computation=%dear, false_computation=%cheap
"""
    dear, cheap = branch.format(name="dear", size=62500), branch.format(name="cheap", size=2)
    for order in ((dear, cheap), (cheap, dear)):
        run = simulate(module(entry, *order), COSTS)
        assert (run.step_s, run.compute_s) == pytest.approx((0.5, 0.5))
        assert [event.name for event in run.timeline] == ["r_dear"]


def test_a_call_is_what_it_calls():
    called = """%called (p: f32[62500]) -> f32[62500] {
  %p = f32[62500]{0} parameter(0)
  ROOT %inner = f32[62500]{0} copy(%p)
}
"""
    run = simulate(
        module("%x = f32[62500]{0} parameter(0)\n%c = f32[62500]{0} call(%x), to_apply=%called", called), COSTS
    )
    assert (run.step_s, [event.name for event in run.timeline]) == (pytest.approx(0.5), ["inner"])


def test_views_are_free():
    entry = """
%x = f32[62500]{0} parameter(0)
%b = f32[250,250]{1,0} bitcast(%x)
%t = (f32[250,250]{1,0}) tuple(%b)
%g = f32[250,250]{1,0} get-tuple-element(%t), index=0
"""
    run = simulate(module(entry), COSTS)
    assert (run.step_s, run.timeline) == (0.0, ())


def test_an_unknown_operation_is_named():
    with pytest.raises(errors.UnknownOperationError) as raised:
        simulate(module("%x = f32[] parameter(0)\n%q = f32[] quantum-leap(%x)"), COSTS)
    assert str(raised.value) == (
        "the compiled program has the operation quantum-leap (%q), which this version of jax_deepcompile cannot time: "
        "it may be newer than XLA's of JAX 0.12. Add it to jax_deepcompile/hlo/opcodes.py."
    )


def test_a_program_without_a_schedule_is_refused():
    with pytest.raises(errors.UnscheduledHloError) as raised:
        simulate(hlo.read("HloModule early\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n"), COSTS)
    assert str(raised.value) == (
        "module early is not scheduled, so nothing says in which order its operations run. Pass the text of a compiled "
        "program, lowered.compile().as_text(), not of a lowered one."
    )
