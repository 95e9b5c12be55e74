"""Traces in Perfetto's own engine: it reads all of each, nests it as it was written, and reckons what was simulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jax_deepcompile.costs.simulation import Event
from jax_deepcompile.costs.streams import Stream
from jax_deepcompile.report import chrome_trace, timeline
from tests.report.test_chrome_trace import PLAYED, simulated
from tests.report.trace_engine import OpenedTrace, TraceEngine, opened

pytestmark = pytest.mark.pure

SLICES = """
  (SELECT s.id, s.ts, s.dur, s.ts + s.dur AS until, s.depth, s.name, s.arg_set_id, t.tid, t.name AS thread, p.pid
   FROM slice s JOIN thread_track tt ON s.track_id = tt.id JOIN thread t USING (utid) JOIN process p USING (upid))
"""
LOST = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
NESTED = f"SELECT name FROM {SLICES} WHERE depth > 0"


@pytest.fixture(scope="module")
def engine() -> TraceEngine:
    return TraceEngine.compiled()


def read(engine: TraceEngine, file: Path) -> OpenedTrace:
    """With nothing lost, and nothing in a row inside of something else."""
    found = opened(engine, file.read_bytes())
    assert found(LOST) == []
    assert found(NESTED) == []
    return found


def at_once(count: int) -> Sequence[Event]:
    """What overlaps on one stream, and what takes no time."""
    spans = [(number * 1e-3, number * 1e-3 + 2.5e-3) for number in range(count)]
    return [Event(Stream.COMPUTE, f"op.{at}", *span, 1, "a/Sync", kind="fusion") for at, span in enumerate(spans)]


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize("file", ["trace.json", "trace.json.gz"])
def test_it_reckons_what_was_simulated(engine: TraceEngine, name: str, file: str, tmp_path: Path):
    run = simulated(name)
    ask = read(engine, *run.write_trace(tmp_path / file))
    events = list(run.unrolled())
    assert ask("SELECT pid, name FROM process WHERE name IS NOT NULL") == [(0, "rank 0, simulated")]
    rows = ask(f"SELECT thread, count(*), sum(dur) FROM {SLICES} GROUP BY tid ORDER BY tid")
    assert [title for title, *_ in rows] == ["step", "compute waits", "compute", "all-gather"]
    counts, taken_ns = ({title: each[at] for title, *each in rows} for at in (0, 1))
    assert counts["compute"] + counts["all-gather"] == len(events)
    assert taken_ns["step"] == pytest.approx(run.step_s * 1e9)
    assert taken_ns["compute"] == pytest.approx(run.compute_s * 1e9)
    assert taken_ns["all-gather"] == pytest.approx(run.communication_s * 1e9)
    assert taken_ns["compute waits"] == pytest.approx(run.exposed_communication_s * 1e9)
    ((overlap_ns,),) = ask(
        f"""SELECT sum(max(0, min(a.until, b.until) - max(a.ts, b.ts))) FROM {SLICES} a, {SLICES} b
            WHERE a.thread = 'all-gather' AND b.thread = 'compute'"""
    )
    assert overlap_ns == pytest.approx((run.communication_s - run.exposed_communication_s) * 1e9)
    (bytes_over_time,) = ask("SELECT t.name, max(c.value) FROM counter c JOIN counter_track t ON c.track_id = t.id")
    assert bytes_over_time == ("live bytes", max(timeline.live_bytes(run)[1]))
    origins = ask(
        f"SELECT DISTINCT extract_arg(arg_set_id, 'args.op') FROM {SLICES} WHERE thread IN ('compute', 'all-gather')"
    )
    assert {op for (op,) in origins} == {event.name for event in events}


def test_a_measured_step_and_the_simulated_one_are_on_one_clock(engine: TraceEngine, tmp_path: Path):
    run = simulated("alike")
    measured = [replace(each, start_s=2 * each.start_s, end_s=2 * each.end_s) for each in run.unrolled()]
    first, last = (read(engine, file) for file in run.write_trace(tmp_path / "t.json", {0: measured, 3: measured}))
    names = "SELECT name FROM process WHERE name IS NOT NULL ORDER BY pid"
    assert first(names) == [("rank 0, measured",), ("simulated",)]
    assert last(names) == [("rank 3, measured",), ("simulated",)]
    for ask in (first, last):
        starts, ends = zip(*ask(f"SELECT ts, until FROM {SLICES} WHERE thread = 'step' ORDER BY pid"), strict=True)
        assert starts == (0, 0)
        assert ends == pytest.approx((2e9 * run.step_s, 1e9 * run.step_s))
        each = f"SELECT ts, dur FROM {SLICES} WHERE thread = 'all-gather' AND pid = "
        begun, twice = (ask(f"{each} {pid} ORDER BY ts") for pid in (1, 0))
        assert len(begun) == 10
        assert twice == [(2 * ts, 2 * dur) for ts, dur in begun]


def test_what_runs_at_once_or_takes_no_time_is_all_there(engine: TraceEngine, tmp_path: Path):
    spans = [(10.0, 10.0), (10.0, 10.0), (10.0, 10.0003), (10.0003, 11.0), (11.0, 11.0), (11.0002, 12.0)]
    brief = [
        Event(Stream.COMPUTE, f"{at}", 1e-3 * a, 1e-3 * b, 1, "b", kind="fusion") for at, (a, b) in enumerate(spans)
    ]
    events = [*at_once(6), *brief]
    (file,) = simulated("alike").write_trace(tmp_path / "t.json", {0: events})
    ask = read(engine, file)
    assert ask(f"SELECT count(*) FROM {SLICES} WHERE pid = 0 AND thread = 'compute'") == [(len(events),)]
    assert ask(f"SELECT ts, dur FROM {SLICES} WHERE pid = 0 AND thread = 'compute waits'") == [(7_500_000, 2_500_000)]


def test_an_empty_step_is_read(engine: TraceEngine, tmp_path: Path):
    file = chrome_trace.write(tmp_path / "t.json", chrome_trace.chrome_trace("simulated", ()))
    assert read(engine, file)("SELECT name FROM process WHERE name IS NOT NULL") == [("rank 0, simulated",)]


def test_what_would_be_lost_is_seen(engine: TraceEngine, tmp_path: Path):
    """Were it all in one row, or no number a number."""
    (file,) = simulated("alike").write_trace(tmp_path / "t.json", {0: at_once(2)})
    trace = json.loads(file.read_text())
    for row in trace["traceEvents"]:
        row["tid"] = 7
    assert ("slice_drop_overlapping_complete_event", 1) in opened(engine, json.dumps(trace).encode())(LOST)
    assert ("json_tokenizer_failure", 1) in opened(engine, b'{"traceEvents": [{"ph": "X", "ts": "now"}]}')(LOST)
    with pytest.raises(AssertionError, match="Unknown trace type"):
        opened(engine, b"none")
