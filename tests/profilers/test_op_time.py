"""Times of ops made of traces, and what stands where there are none."""

from __future__ import annotations

from collections import Counter

import pytest

from jax_deepcompile.costs.entries import Method
from jax_deepcompile.profilers.attribution import ExecutedOp, Site
from jax_deepcompile.profilers.op_time import op_times, unmeasured
from jax_deepcompile.profilers.trace import Trace

pytestmark = pytest.mark.pure

SITE = Site(7, "train.py:12 (loss)", ((8,),))
OPS = (
    ExecutedOp("fusion.1", 4, (SITE,), SITE.line),
    ExecutedOp("sine", None, (), ""),
    ExecutedOp("copy.9", 1, (), ""),
)


def trace(seconds: dict[tuple[int, str], float], events: int = 4) -> Trace:
    return Trace(seconds, Counter(dict.fromkeys(seconds, events)))


TRACES = [
    trace({(0, "fusion.1"): 4.0, (1, "fusion.1"): 8.0, (1, "sine"): 2.0}),
    trace({(0, "fusion.1"): 40.0, (1, "fusion.1"): 8.0, (1, "sine"): 2.0}),
    trace({(0, "fusion.1"): 8.0, (1, "fusion.1"): 12.0, (1, "sine"): 2.0}),
]


def test_the_median_over_runs_on_each_device_and_over_devices():
    fusion = op_times(OPS, TRACES)[0]
    assert fusion.per_device_s == (2.0, 2.0)
    assert fusion.seconds == 2.0
    assert (fusion.executions, fusion.equations, fusion.where) == (4, (7,), "train.py:12 (loss)")
    assert (fusion.source.method, fusion.source.runs) == (Method.MEASURED, 3)


def test_several_kernels_of_one_execution_are_one_execution():
    [fusion] = op_times(OPS[:1], [trace({(0, "fusion.1"): 4.0}, events=12)])
    assert (fusion.executions, fusion.seconds) == (4, 1.0)


def test_where_a_loop_does_not_tell_events_are_executions():
    [sine] = op_times(OPS[1:2], [trace({(0, "sine"): 6.0}, events=3)])
    assert (sine.executions, sine.seconds) == (3, 2.0)


def test_an_op_without_events_falls_back():
    copy = op_times(OPS, TRACES)[2]
    assert (copy.per_device_s, copy.seconds) == ((), None)
    assert str(copy.source) == "analytical: no event of this op in the traces of 3 runs"


def test_an_empty_trace_is_nothing_but_fallbacks():
    assert [op.source.method for op in op_times(OPS, [Trace()])] == [Method.ANALYTICAL] * 3


def test_no_trace_at_all_says_why():
    busy = Trace(problem="RuntimeError: only one profile at a time")
    assert {str(op.source) for op in op_times(OPS, [busy, busy])} == {
        "analytical: RuntimeError: only one profile at a time"
    }
    assert op_times(OPS, []) == unmeasured(OPS, "no run was traced")


def test_runs_whose_trace_failed_do_not_count():
    [fusion] = op_times(OPS[:1], [Trace(problem="lost"), *TRACES])
    assert fusion.source.runs == 3
