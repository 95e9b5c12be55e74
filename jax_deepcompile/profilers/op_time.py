"""Times the HLO ops of a step one by one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from jax_deepcompile.costs.entries import OpTime, analytical
from jax_deepcompile.profilers.attribution import ExecutedOp
from jax_deepcompile.profilers.runs import StepRuns
from jax_deepcompile.profilers.timing import measured
from jax_deepcompile.profilers.trace import Trace, traced


def measure_ops(
    step: StepRuns, ops: Sequence[ExecutedOp], module_name: str, runs: int
) -> tuple[tuple[OpTime, ...], Trace]:
    """Device time of each op in ``runs`` runs, each traced by itself, and the last of the traces.

    Should the profiler fail, the step runs all the same, as often: in a run of several processes no one waits for it.

    Args:
      step: has run before, so that nothing is compiled while it is traced.
      ops: of the compiled step.
      module_name: of the compiled step.
      runs: how many to trace.
    """
    traces = [traced(step, module_name)[1] for _ in range(runs)]
    return op_times(ops, traces), traces[-1]


def unmeasured(ops: Sequence[ExecutedOp], why: str) -> tuple[OpTime, ...]:
    """Entries of ops that were not timed because of ``why``."""
    return tuple(OpTime(op.name, (), op.executions or 0, _positions(op), op.where, analytical(why)) for op in ops)


def op_times(ops: Sequence[ExecutedOp], traces: Sequence[Trace]) -> tuple[OpTime, ...]:
    """The median over ``traces`` for each op; an op without events gets an entry that says so."""
    complete = [trace for trace in traces if not trace.problem]
    if not complete:
        return unmeasured(ops, next((trace.problem for trace in traces), "no run was traced"))
    devices = sorted({device for trace in complete for device, _ in trace.seconds})
    return tuple(_op_time(op, complete, devices) for op in ops)


def _op_time(op: ExecutedOp, traces: Sequence[Trace], devices: Sequence[int]) -> OpTime:
    events = [trace.events[device, op.name] for trace in traces for device in devices]
    if not any(events):
        return unmeasured([op], f"no event of this op in the traces of {len(traces)} runs")[0]
    executions = op.executions or max(1, round(statistics.median(events)))
    per_device_s = tuple(
        statistics.median(trace.seconds.get((device, op.name), 0.0) for trace in traces) / executions
        for device in devices
    )
    return OpTime(op.name, per_device_s, executions, _positions(op), op.where, measured(len(traces)))


def _positions(op: ExecutedOp) -> tuple[int, ...]:
    return tuple(site.position for site in op.sites)
