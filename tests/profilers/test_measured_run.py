"""A traced run told as a simulation: what was waited for, by which operation, and what only the simulation knows."""

from __future__ import annotations

import pytest

from jax_deepcompile.costs.memory import MemoryUse
from jax_deepcompile.costs.simulation import Event, Simulation, Totals
from jax_deepcompile.costs.streams import Part, Stream
from jax_deepcompile.profilers.measured_run import measured_run

pytestmark = pytest.mark.pure

SIMULATED = Simulation(
    2.0,
    Totals(),
    (),
    (
        Event(Stream.COMPUTE, "dot", 0.0, 1.0, trips=2, loop="while", part=Part.PRODUCTS),
        Event(Stream.ALL_GATHER, "gather", 0.0, 1.0, sent_bytes=7, source="step.py:3"),
    ),
    MemoryUse(100, 10, 1, 0, ("dot",), (111,), ()),
)
RAN = (
    Event(Stream.ALL_GATHER, "gather", 0.0, 2.0),
    Event(Stream.COMPUTE, "dot", 1.5, 3.0),
    Event(Stream.ALL_GATHER, "gather", 2.5, 4.5),
    Event(Stream.COMPUTE, "dot", 4.0, 5.0),
    Event(Stream.TO_HOST, "copy", 4.5, 5.5),
)


def test_what_was_waited_for_is_what_ran_while_no_kernel_did():
    run = measured_run(RAN, SIMULATED)
    assert [(wait.name, wait.start_s, wait.seconds) for wait in run.waits] == [
        ("gather", 0.0, 1.5),
        ("gather", 3.0, 1.0),
        ("copy", 5.0, 0.5),
    ]
    assert (run.step_s, run.compute_s, run.communication_s, run.copy_s) == (5.5, 2.5, 4.0, 1.0)
    assert (run.exposed_communication_s, run.exposed_copy_s) == (2.5, 0.5)


def test_a_trace_does_not_say_what_the_simulation_does():
    run = measured_run(RAN, SIMULATED)
    assert run.is_measured
    assert run.totals.kernels_s == {Part.PRODUCTS: 2.5}
    assert (run.sent_bytes, run.timeline[0].source, run.peak_bytes) == (14, "step.py:3", 111)
    assert {(event.trips, event.loop) for event in run.timeline} == {(1, "")}


def test_nothing_ran():
    assert measured_run((), SIMULATED).step_s == 0
