"""What a better schedule of a loop's operations may save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.simulation import Event, Loop, Simulation, Totals
from jax_deepcompile.costs.streams import Stream

pytestmark = pytest.mark.pure

NOTHING = MemoryUse(0, 0, 0, 0, (), (), ())


def loop(trip_s: float, trip: Totals, **more) -> Loop:
    return Loop("while", "", 10, True, trip_s, trip, **more)


def test_the_busiest_stream_of_a_trip_is_never_idle():
    waits = loop(3.0, Totals(compute_s=2.0, communication_s=1.5))
    assert waits.hideable_s == pytest.approx(1.0)
    assert Simulation(40.0, Totals(), (waits,), (), NOTHING).attainable_s == pytest.approx(30.0)


def test_a_loop_that_runs_again_and_again_saves_as_often():
    inner = loop(3.0, Totals(compute_s=2.0), executions=4)
    outer = loop(35.0, Totals(compute_s=20.0), is_innermost=False)
    assert Simulation(200.0, Totals(), (inner, outer), (), NOTHING).attainable_s == pytest.approx(160.0)


def test_a_trip_that_waits_for_nothing_saves_nothing():
    assert loop(2.0, Totals(compute_s=2.0, communication_s=2.0)).hideable_s == 0.0


seconds = st.floats(0.0, 10.0)


@given(seconds, seconds, seconds)
def test_no_step_takes_longer_than_it_did(compute_s, communication_s, idle_s):
    totals = Totals(compute_s=compute_s, communication_s=communication_s)
    each = loop(max(compute_s, communication_s) + idle_s, totals)
    run = Simulation(10 * each.trip_s, Totals(), (each,), (), NOTHING)
    assert 0.0 <= run.attainable_s <= run.step_s + 1e-9


def test_what_xla_rematerialised_is_told_by_its_name():
    names = {"fusion.1": 1.0, "fusion.1.remat": 2.0, "dot.3.remat2": 4.0, "add.remat.5": 8.0, "rematerialize.2": 16.0}
    events = tuple(Event(Stream.COMPUTE, name, 1.0, 1.0 + seconds, trips=2) for name, seconds in names.items())
    assert Simulation(40.0, Totals(), (), events, NOTHING).rematerialized_s == pytest.approx(2 * (2.0 + 4.0 + 8.0))
