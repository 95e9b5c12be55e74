"""Traces: what Holistic Trace Analysis reckons from the file is what the simulation says, and every viewer nests it."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from jax_deepcompile import errors
from jax_deepcompile.costs.simulation import Event, merged
from jax_deepcompile.costs.simulator import simulate
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.report import chrome_trace
from jax_deepcompile.report.simulated import SimulatedStep
from jax_deepcompile.report.timeline import waits
from tests.costs.snippets import (
    BODY,
    COSTS,
    DONE,
    GATHER,
    START,
    WHILE,
    WORK,
    leaving_a_gather_for_the_next_trip,
    module,
)

pytestmark = pytest.mark.pure

PLAYED = {"alike": module(WHILE, BODY), "carried": leaving_a_gather_for_the_next_trip()}


def simulated(name: str) -> SimulatedStep:
    return SimulatedStep(**vars(simulate(PLAYED[name], COSTS)), devices=4)


def read(file: Path) -> dict:
    return json.loads(gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes())


def kernels(trace: dict) -> list[dict]:
    """What an analyser takes for the GPU's."""
    return [row for row in trace["traceEvents"] if "stream" in row.get("args", {})]


def overlap(trace: dict) -> float:
    """Holistic Trace Analysis' ``get_comm_comp_overlap``, by its rules for names."""
    spans = defaultdict(list)
    for row in kernels(trace):
        is_communication = re.match(r"nccl.*Kernel", row["name"])
        assert is_communication or not re.match(r".*Memcpy|Memset|dma|.*Sync", row["name"])
        spans[bool(is_communication)].append((row["ts"], row["ts"] + row["dur"]))
    communication, computation = merged(spans[True]), merged(spans[False])
    shared = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in communication for b in computation)
    return shared / sum(end - start for start, end in communication)


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize("file", ["trace.json", "trace.json.gz"])
def test_what_overlaps_in_the_file_is_what_was_simulated(name: str, file: str, tmp_path: Path):
    run = simulated(name)
    (written,) = run.write_trace(tmp_path / file)
    trace = read(written)
    assert overlap(trace) == pytest.approx(1 - run.exposed_communication_s / run.communication_s, abs=1e-4)
    assert trace["distributedInfo"] == {"backend": "nccl", "rank": 0, "world_size": 4}
    (step,) = (row for row in trace["traceEvents"] if row["name"] == "ProfilerStep#1")
    assert (step["ts"], step["dur"]) == (0, round(run.step_s * 1e6))
    waits = [row for row in trace["traceEvents"] if row["name"].startswith("waits for all-gather")]
    assert sum(row["dur"] for row in waits) == pytest.approx(run.exposed_communication_s * 1e6, abs=len(waits))
    assert len({row["args"]["correlation"] for row in kernels(trace)}) == len(list(run.unrolled()))


def test_every_row_nests_and_has_a_name(tmp_path: Path):
    """Of what runs at once on one stream, as on a host, each has a row."""
    at_once = [
        Event(Stream.COMPUTE, f"op.{number}", number * 1e-3, number * 1e-3 + 2.5e-3, 1, "a/<b>/Sync", kind="fusion")
        for number in range(6)
    ]
    files = simulated("alike").write_trace(tmp_path / "t.json", {0: at_once, 3: at_once[:1]})
    assert [file.name for file in files] == ["t.json", "t.rank3.json"]
    first, last = map(read, files)
    assert (first["distributedInfo"]["rank"], last["distributedInfo"]["rank"]) == (0, 3)
    for trace in (first, last):
        rows, named = defaultdict(list), set()
        for row in trace["traceEvents"]:
            if row["ph"] == "X":
                rows[row["pid"], row["tid"]].append((row["ts"], row["ts"] + row["dur"]))
            elif row["name"] == "thread_name":
                named.add((row["pid"], row["tid"]))
        assert named >= rows.keys()
        assert all(before[1] <= after[0] for spans in rows.values() for before, after in pairwise(sorted(spans)))
        assert {row["pid"] for row in kernels(trace)} == {0}
    assert len(kernels(first)) == 6
    assert {row["name"] for row in kernels(first)} == {"a/<b> sync"}
    assert "simulated" in {row["args"].get("name") for row in first["traceEvents"] if row["name"] == "process_name"}


def test_what_xla_leaves_without_a_name_has_that_of_what_is_beside_it(tmp_path: Path):
    named = DONE.replace(
        "(%start)", '(%start), metadata={op_name="jit(f)/Net/up/dot" source_file="/n.py" source_line=7}'
    )
    run = SimulatedStep(**vars(simulate(module(f"{GATHER}{START}\n{WORK}\nROOT {named}"), COSTS)), devices=4)
    rows = read(*run.write_trace(tmp_path / "t.json"))["traceEvents"]
    (gather,) = (row for row in rows if row["name"].startswith("nccl"))
    assert (gather["name"], gather["args"]["line"]) == ("ncclDevKernel_AllGather Net/up dot", "/n.py:7")


def event(stream: Stream, name: str, start_s: float, end_s: float) -> Event:
    return Event(stream, name, start_s, end_s, 1)


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ([(Stream.ALL_GATHER, "short", 8.5, 9.0), (Stream.TO_HOST, "long", 0.5, 8.9)], "short"),  # ends with the wait
        ([(Stream.ALL_GATHER, "measured", 0.9, 8.7), (Stream.TO_HOST, "short", 7.0, 8.8)], "measured"),
        ([(Stream.ALL_GATHER, "begun long before", 0.0, 8.7)], "begun long before"),
        ([(Stream.ALL_GATHER, "goes on", 2.0, 9.5)], "goes on"),
        ([(Stream.ALL_GATHER, "little of it", 0.9, 4.0), (Stream.TO_HOST, "before", 0.0, 0.9)], None),
        ([(Stream.ALL_GATHER, "after it", 9.0, 9.5)], None),
        ([], None),
    ],
)
def test_what_compute_waits_for(others: list[tuple[Stream, str, float, float]], cause: str | None):
    kernels = [event(Stream.COMPUTE, "a", 0.0, 1.0), event(Stream.COMPUTE, "b", 9.0, 10.0)]
    (wait,) = waits([*kernels, *(event(*each) for each in others)])
    assert (wait.start_s, wait.end_s) == (1.0, 9.0)
    assert (wait.cause.name if wait.cause else None) == cause


@pytest.mark.parametrize("file", ["trace.txt", "trace", "no_folder/trace.json"])
def test_what_no_viewer_opens_is_refused(file: str, tmp_path: Path):
    with pytest.raises(errors.ArgumentError, match=r"write_trace\(file=.*: expected a file that ends in .json"):
        simulated("alike").write_trace(tmp_path / file)
    assert not list(tmp_path.iterdir())


def test_an_empty_step_is_a_trace():
    trace = chrome_trace.chrome_trace("simulated", ())
    assert kernels(trace) == []
    assert json.loads(json.dumps(trace))["traceEvents"]
