"""Reads device time per HLO op from a trace of ``jax.profiler``."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.profiler import ProfileData

from jax_deepcompile.profilers.timing import reason

T = TypeVar("T")

_NS_PER_S = 1e9
_GPU = "/device:GPU:"
_STREAM = "Stream"
_HOST_EVENTS_OF_THE_CPU_BACKEND = 2
"""The host tracer's level from which the CPU backend reports its ops."""


@dataclass(frozen=True)
class Span:
    """One execution of an HLO op.

    Attributes:
      device: its ordinal.
      op: name of the HLO op.
      kernel: name of what ran.
      start_s, end_s: on the profiler's clock, one for all devices.
    """

    device: int
    op: str
    kernel: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """Device time of one traced call.

    Attributes:
      seconds: by (device ordinal, name of the HLO op), summed over its executions.
      events: how many events that was, by the same.
      spans: each of them.
      problem: why there is none; empty if there is.
    """

    seconds: dict[tuple[int, str], float] = field(default_factory=dict)
    events: Counter[tuple[int, str]] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    problem: str = ""


def traced(run: Callable[[], T], module_name: str) -> tuple[T, Trace]:
    """Calls ``run`` once, whatever becomes of the trace, and says what the devices did for ``module_name``."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = _HOST_EVENTS_OF_THE_CPU_BACKEND
    with tempfile.TemporaryDirectory(prefix="deepcompile_trace_") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            return jax.block_until_ready(run()), Trace(problem=reason(error))
        try:
            result = jax.block_until_ready(run())
        finally:
            problem = _stop()
        return result, Trace(problem=problem) if problem else read_trace(Path(folder), module_name)


def _stop() -> str:
    try:
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:
        return reason(error)
    return ""


def read_trace(folder: Path, module_name: str) -> Trace:
    """What the trace files in ``folder`` say about the module."""
    profiles = [ProfileData.from_file(str(path)) for path in sorted(folder.rglob("*.xplane.pb"))]
    return read_profiles(profiles, module_name) if profiles else Trace(problem="the profiler wrote no trace")


def read_profiles(profiles: Sequence[Any], module_name: str) -> Trace:
    """Sums the events of the module's ops in ``jax.profiler.ProfileData``.

    GPUs have a plane each, with their streams as lines; lines of other names repeat the streams' events under other
    headings. The CPU backend reports in the plane of the host, where with GPUs the launches are reported.
    """
    trace = Trace()
    with warnings.catch_warnings():
        # 2026-06, jax 0.11 on Python 3.12 and later: the first use of an event's type warns of its own definition, and
        # where warnings are errors that ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = [plane for profile in profiles for plane in profile.planes]
        gpus = [plane for plane in planes if plane.name.startswith(_GPU)]
        for plane in gpus or planes:
            for device, op, event in _op_events(plane, module_name):
                seconds, start_s = event.duration_ns / _NS_PER_S, event.start_ns / _NS_PER_S
                trace.seconds[device, op] = trace.seconds.get((device, op), 0.0) + seconds
                trace.events[device, op] += 1
                trace.spans.append(Span(device, op, event.name, start_s, start_s + seconds))
    return trace


def _op_events(plane: Any, module_name: str) -> Iterator[tuple[int, str, Any]]:
    """Device ordinal, name of the HLO op and the event, for each of the module."""
    on_gpu = plane.name.startswith(_GPU)
    for line in plane.lines:
        if on_gpu and not line.name.startswith(_STREAM):
            continue
        for event in line.events:
            found = dict(event.stats)
            if found.get("hlo_module") == module_name and "hlo_op" in found:
                device = int(plane.name.removeprefix(_GPU) if on_gpu else found["device_ordinal"])
                yield device, found["hlo_op"], event
