"""Steps as Chrome traces: JSON that Perfetto and Holistic Trace Analysis open, one file a rank.

Names and fields are those that PyTorch's profiler writes for GPUs: kernels have a stream and a correlation, collectives
are called ``ncclDevKernel_…`` and copies ``Memcpy …``, the step is a ``ProfilerStep``, and ``distributedInfo`` has the
rank. An analyser takes every event with a stream for one of the same GPU, so that one step of a file has streams: of a
measured step with the simulated one beside it, the measured one. Times are whole microseconds: what has fractions is
shortened by Holistic Trace Analysis, each kernel by itself, and gaps come in between.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jax_deepcompile import errors
from jax_deepcompile.costs.simulation import Event
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.report import timeline
from jax_deepcompile.report.origins import Origins
from jax_deepcompile.report.words import line_text

Json: TypeAlias = dict[str, Any]

_US_PER_S, _NS_PER_S = 1e6, 1e9
SUFFIXES = (".json", ".json.gz")
"""Of what opens traces."""
_FIRST_STREAM = 7
"""CUDA's first stream that is not its own."""
_STREAMS = list(Stream)
_STEP_ROW, _WAITS_ROW, _FIRST_ROW = 5, 6, 7
"""None is the number of a process, whose main thread it were to a viewer."""
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
_NOBODY = Origins.of(None)


def chrome_trace(
    name: str,
    events: Iterable[Event],
    *,
    rank: int = 0,
    world_size: int = 1,
    beside: Mapping[str, Iterable[Event]] | None = None,
    live_bytes: tuple[Sequence[float], Sequence[int]] = ((), ()),
    origins: Origins = _NOBODY,
) -> Json:
    """One step of one device.

    Args:
      name: what ``events`` are, such as ``simulated``.
      events: each of one trip, on one clock that begins with the step, in seconds.
      rank: of the device among ``world_size``.
      beside: other steps by name, on the same clock, to look at only.
      live_bytes: seconds, and bytes of device memory needed from then on.
      origins: of the instructions that ``events`` are called after.

    Returns:
      What ``json.dumps`` makes a trace of.
    """
    steps = {f"rank {rank}, {name}": events, **(beside or {})}
    ranks = [rank, *(None for _ in beside or ())]
    processes = [_Process(number, *each, origins) for number, each in enumerate(zip(steps, ranks, strict=True))]
    rows = [row for process, each in zip(processes, steps.values(), strict=True) for row in process.rows(list(each))]
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "traceEvents": [*rows, *_memory(*live_bytes)],
    }


def required(file: str | os.PathLike) -> Path:
    """``file`` as a path, if what opens traces would open it.

    Raises:
      ArgumentError: it ends in neither ``.json`` nor ``.json.gz``, or its folder is not there.
    """
    path = Path(file)
    if not path.name.endswith(SUFFIXES) or not path.parent.is_dir():
        expected = "a file that ends in .json or .json.gz, in a folder that is there"
        raise errors.ArgumentError("write_trace", "file", str(file), expected)
    return path


def write(path: Path, trace: Json) -> Path:
    """Writes ``trace``, an event a line; compressed where ``path`` ends in ``.gz``."""
    head = json.dumps({key: value for key, value in trace.items() if key != "traceEvents"})
    rows = ",\n".join(map(json.dumps, trace["traceEvents"]))
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(f'{head[:-1]}, "traceEvents": [\n{rows}\n]}}\n')
    return path


def path_of_rank(path: Path, rank: int) -> Path:
    """``trace.json`` of rank 0 is ``trace.rank1.json`` of rank 1."""
    end = ".json.gz" if path.name.endswith(".gz") else ".json"
    return path if rank == 0 else path.with_name(f"{path.name.removesuffix(end)}.rank{rank}{end}")


@dataclass(frozen=True)
class _Process:
    """What a trace calls a process: the rows of one step.

    Attributes:
      number: in the trace.
      name: of the step.
      rank: of the GPU whose events these are to an analyser; None where they are only to be looked at.
      origins: what its instructions are of.
    """

    number: int
    name: str
    rank: int | None
    origins: Origins

    def rows(self, events: Sequence[Event]) -> Iterator[Json]:
        yield self._named("process", self.name)
        ended_s = max((event.end_s for event in events), default=0.0)
        yield self._named("thread", "step", _STEP_ROW)
        yield self._annotation(_STEP_ROW, "ProfilerStep#1", 0.0, ended_s, {})
        yield self._named("thread", "compute waits", _WAITS_ROW)
        waits = (wait for wait in timeline.waits(events) if _us(wait.end_s) > _us(wait.start_s))
        yield from map(self._wait, waits)
        lanes, said = _lanes(events), {}
        rows = {lane: row for row, lane in enumerate(sorted(set(lanes)), _FIRST_ROW)}
        for (stream, _), row in rows.items():
            yield self._named("thread", str(_STREAMS[stream]), row)
        for correlation, (lane, event) in enumerate(zip(lanes, events, strict=True), 1):
            if event.name not in said:
                operation, origin = self._said(event)
                said[event.name] = {"name": _name(event.stream, operation), "args": origin}
            launched = {"stream": _stream(event.stream), "device": self.rank, "correlation": correlation}
            args = said[event.name]["args"] | {"nanoseconds": round((event.end_s - event.start_s) * _NS_PER_S)}
            yield {
                "ph": "X",
                "name": said[event.name]["name"],
                "cat": self._category(event),
                **self._span(rows[lane], event.start_s, event.end_s),
                "args": args if self.rank is None else launched | args,
            }

    def _category(self, event: Event) -> str:
        if self.rank is None:
            return "beside"
        return "gpu_memcpy" if event.stream.is_copy else "kernel"

    def _wait(self, wait: timeline.Wait) -> Json:
        name, origin = "what nobody recorded", {}
        if wait.cause:
            operation, origin = self._said(wait.cause)
            name = _waited(wait.cause.stream, operation)
        return self._annotation(_WAITS_ROW, f"waits for {name}", wait.start_s, wait.end_s, origin)

    def _said(self, event: Event) -> tuple[str, Json]:
        """What it does, in the user's words, and where it is from."""
        operation, line = self.origins.said(event.name, event.op_name, event.source)
        sent = {"sent bytes": event.sent_bytes} if event.sent_bytes else {}
        return operation, {"op": event.name, "path": event.op_name, "line": line_text(line)} | sent

    def _annotation(self, thread: int, name: str, start_s: float, end_s: float, args: Json) -> Json:
        return {"ph": "X", "name": name, "cat": "user_annotation", **self._span(thread, start_s, end_s), "args": args}

    def _named(self, what: str, name: str, thread: int = 0) -> Json:
        where = {"pid": self.number, "tid": thread, "ts": 0}
        return {"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}}

    def _span(self, thread: int, start_s: float, end_s: float) -> Json:
        """Beginning and duration; what follows on another begins exactly where it ends."""
        start, end = _us(start_s), _us(end_s)
        return {"pid": self.number, "tid": thread, "ts": start, "dur": end - start}


def _lanes(events: Sequence[Event]) -> list[tuple[int, int]]:
    """The stream that each event is on, and which of its rows it is in: the first one that is free.

    Of two in a row that begin at once, viewers take one for a part of the other, even if it takes no time.
    """
    free: dict[tuple[int, int], int] = {}
    lanes = []
    for event in events:
        stream, row = _STREAMS.index(event.stream), 0
        while free.get((stream, row), 0) > _us(event.start_s):
            row += 1
        free[stream, row] = max(_us(event.end_s), _us(event.start_s) + 1)
        lanes.append((stream, row))
    return lanes


def _waited(stream: Stream, operation: str) -> str:
    """As short as a row has room for."""
    return f"a copy {stream}" if stream.is_copy else f"{stream} {operation}"


def _name(stream: Stream, operation: str) -> str:
    """What an analyser tells kernels, collectives and copies by."""
    if stream.is_copy:
        return _COPIES[stream]
    if stream is not Stream.COMPUTE:
        return f"ncclDevKernel_{_KERNELS[stream]} {operation}"
    for part in _TAKEN_FOR_OTHERS:
        operation = operation.replace(part, part.lower())
    return f"_{operation}" if operation.startswith(("nccl", "dma")) else operation


def _memory(seconds: Sequence[float], sizes: Sequence[int]) -> Iterator[Json]:
    before = None
    for at_s, size in zip(seconds, sizes, strict=True):
        if size != before:
            where = {"pid": 0, "tid": 0, "ts": _us(at_s)}
            yield {"ph": "C", "name": "live", **where, "args": {"bytes": size}}
        before = size


def _stream(stream: Stream) -> int:
    return _FIRST_STREAM + _STREAMS.index(stream)


def _us(seconds: float) -> int:
    return round(seconds * _US_PER_S)
