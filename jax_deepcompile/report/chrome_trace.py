"""Steps as Chrome traces: JSON that Perfetto and Holistic Trace Analysis open, one file a rank.

Names and fields are those that PyTorch's profiler writes for GPUs: kernels have a stream and a correlation, collectives
are called ``ncclDevKernel_…`` and copies ``Memcpy …``, the step is a ``ProfilerStep``, and ``distributedInfo`` has the
rank. An analyser takes every event with a stream for one of the same GPU, so that one step of a file has streams: of a
measured step with the simulated one beside it, the measured one. Times are whole microseconds: what has fractions is
shortened by Holistic Trace Analysis, each kernel by itself, and gaps come in between.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jax_deepcompile import errors
from jax_deepcompile.costs.simulation import Event
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.report import timeline

Json: TypeAlias = dict[str, Any]

_US_PER_S, _NS_PER_S = 1e6, 1e9
_FIRST_STREAM = 7
"""CUDA's first stream that is not its own."""
_STEP, _BESIDE = 0, 1
"""Processes of a trace."""
_WAITS, _STEPS = "waits", "step"
_KERNELS = {
    Stream.ALL_GATHER: "AllGather",
    Stream.ALL_REDUCE: "AllReduce",
    Stream.ALL_TO_ALL: "AllToAll",
    Stream.BROADCAST: "Broadcast",
    Stream.PERMUTE: "SendRecv",
    Stream.RAGGED_ALL_TO_ALL: "RaggedAllToAll",
    Stream.REDUCE_SCATTER: "ReduceScatter",
}
_COPIES = {Stream.TO_HOST: "Memcpy DtoH (Device -> Pinned)", Stream.FROM_HOST: "Memcpy HtoD (Pinned -> Device)"}
_TAKEN_FOR_OTHERS = ("Sync", "Memcpy", "Memset")
"""What in the name of a kernel makes an analyser take it for something else."""


def chrome_trace(
    name: str,
    events: Iterable[Event],
    *,
    rank: int = 0,
    world_size: int = 1,
    beside: Mapping[str, Iterable[Event]] | None = None,
    live_bytes: tuple[Sequence[float], Sequence[int]] = ((), ()),
) -> Json:
    """One step of one device.

    Args:
      name: what ``events`` are, such as ``simulated``.
      events: each of one trip, on one clock that begins with the step, in seconds.
      rank: of the device among ``world_size``.
      beside: other steps by name, on the same clock, to look at only.
      live_bytes: seconds, and bytes of device memory needed from then on.

    Returns:
      What ``json.dumps`` makes a trace of.
    """
    events, correlations = list(events), itertools.count(1)
    found = [*_named(_STEP, f"{name}, rank {rank}"), *_step(_STEP, events)]
    for event in events:
        launched = {"stream": _stream(event.stream), "device": rank, "correlation": next(correlations)}
        found += [_complete(_STEP, event, launched)]
    found += _memory(*live_bytes)
    for process, (other, theirs) in enumerate((beside or {}).items(), _BESIDE):
        theirs = list(theirs)
        found += [*_named(process, other), *_step(process, theirs)]
        found += [_complete(process, event, {}) for event in theirs]
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "traceEvents": found,
    }


def write(path: Path, trace: Json) -> None:
    """Writes ``trace``, an event a line; compressed where ``path`` ends in ``.gz``."""
    head = json.dumps({key: value for key, value in trace.items() if key != "traceEvents"})
    rows = ",\n".join(map(json.dumps, trace["traceEvents"]))
    text = f'{head[:-1]}, "traceEvents": [\n{rows}\n]}}\n'
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(text)


def required(file: str | os.PathLike) -> Path:
    """``file`` as a path, if what opens traces would open it.

    Raises:
      ArgumentError: it ends in neither ``.json`` nor ``.json.gz``.
    """
    path = Path(file)
    if not path.name.endswith((".json", ".json.gz")):
        raise errors.ArgumentError("write_trace", "file", str(file), "a file that ends in .json or .json.gz")
    return path


def path_of_rank(path: Path, rank: int) -> Path:
    """``trace.json`` of rank 0 is ``trace.rank1.json`` of rank 1."""
    stem, dot, rest = path.name.partition(".")
    return path if rank == 0 else path.with_name(f"{stem}.rank{rank}{dot}{rest}")


def _complete(process: int, event: Event, launched: Json) -> Json:
    category = "gpu_memcpy" if event.stream.is_copy else "kernel"
    exactly = {"nanoseconds": round((event.end_s - event.start_s) * _NS_PER_S)}
    said = {"op": event.name, "from": timeline.title(event), "line": timeline.line(event)} | exactly
    sent = {"sent bytes": event.sent_bytes} if event.sent_bytes else {}
    span = _span(event.start_s, event.end_s)
    where = {"cat": category if launched else "simulated", "pid": process, "tid": _stream(event.stream)}
    return {"ph": "X", "name": _name(event), **where, **span, "args": launched | said | sent}


def _name(event: Event) -> str:
    if event.stream.is_copy:
        return _COPIES[event.stream]
    if event.stream is not Stream.COMPUTE:
        scope = timeline.scope(event.op_name)[0]
        return f"ncclDevKernel_{_KERNELS[event.stream]}" + f" {scope}" * bool(scope)
    name = timeline.title(event)
    for part in _TAKEN_FOR_OTHERS:
        name = name.replace(part, part.lower())
    return f"_{name}" if name.startswith(("nccl", "dma")) else name


def _step(process: int, events: Sequence[Event]) -> Iterator[Json]:
    """The whole step, and what compute waits for in it."""
    ended_s = max((event.end_s for event in events), default=0.0)
    streams = sorted({event.stream for event in events}, key=list(Stream).index)
    for stream in streams:
        yield from _named_thread(process, _stream(stream), str(stream))
    first = _FIRST_STREAM + len(Stream)
    for number, (thread, rows) in enumerate(
        {
            _STEPS: [("ProfilerStep#1", 0.0, ended_s)],
            _WAITS: [
                (f"waits for {_name(wait.cause) if wait.cause else 'another device'}", wait.start_s, wait.end_s)
                for wait in timeline.waits(events)
            ],
        }.items(),
        first,
    ):
        yield from _named_thread(process, number, thread)
        for name, start_s, end_s in rows:
            where = {"cat": "user_annotation", "pid": process, "tid": number}
            yield {"ph": "X", "name": name, **where, **_span(start_s, end_s), "args": {}}


def _memory(seconds: Sequence[float], sizes: Sequence[int]) -> Iterator[Json]:
    before = None
    for at_s, size in zip(seconds, sizes, strict=True):
        if size != before:
            counted = {"ph": "C", "name": "live bytes", "pid": _STEP, "tid": 0, "ts": _us(at_s)}
            yield counted | {"args": {"bytes": size}}
        before = size


def _named(process: int, name: str) -> Iterator[Json]:
    for kind, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": process})):
        yield {"ph": "M", "name": kind, "pid": process, "tid": 0, "ts": 0, "args": args}


def _named_thread(process: int, thread: int, name: str) -> Iterator[Json]:
    for kind, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": thread})):
        yield {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}


def _stream(stream: Stream) -> int:
    return _FIRST_STREAM + list(Stream).index(stream)


def _span(start_s: float, end_s: float) -> Json:
    """Beginning and duration; what follows on another begins exactly where it ends."""
    start, end = _us(start_s), _us(end_s)
    return {"ts": start, "dur": end - start}


def _us(seconds: float) -> int:
    return round(seconds * _US_PER_S)
