"""Programs written to read: before and after each stage and each kind of decision, as what users know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.report.printer import changed_counts, readable
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from tests.report.pages import SHAPES, step, traced

pytestmark = pytest.mark.pure

PLAN = deepcompile.Plan("", (StackCollectives("w @forward", ("w",)),))


def test_a_program_reads_as_what_it_gathers_computes_and_reduces():
    text = readable(traced(plan=PLAN).sharded)
    assert "  params['w']: param float32[4,16,16] shard(1: fsdp)" in text
    assert ", in the memory of the input" in text
    assert "  loop w @forward: 4 iterations\n    gathers: 1 values, 1.0 KiB an iteration: w\n" in text
    assert "  loop w @backward: 4 iterations, last layer first\n" in text
    assert re.search(r"\n      <lambda> all_gather: float32\[16,16\] 1.0 KiB  .*pages.py:\d+\n", text)


def test_seconds_stand_beside_operations_of_the_local_view():
    mesh = deepcompile.targets.h100(nodes=1).make_mesh((8,), ("fsdp",))
    found = deepcompile.shard(step, mesh, plan=PLAN).trace(*SHAPES)
    costs = found.compilation._costs
    assert " ms network" in readable(found.sharded, costs)
    assert " ms " not in readable(found.program, costs)


def test_what_changed_is_counted():
    found = traced(plan=PLAN)
    assert changed_counts(found.sharded, found.sharded) == "as many of each operation"
    assert "+1 all_gather" in changed_counts(found.program, found.sharded) or "+2 all_gather" in changed_counts(
        found.program, found.sharded
    )


@pytest.mark.parametrize("how", ["method", "variable"])
def test_every_stage_and_decision_is_written(tmp_path: Path, monkeypatch, how: str):
    if how == "method":
        folder = tmp_path / "new" / "folder"
        traced(plan=PLAN).dump(folder)
    else:
        monkeypatch.setenv("DEEPCOMPILE_DUMP", str(tmp_path))
        for number in range(2):
            traced(plan=PLAN).plan()
            folder = tmp_path / f"step_{number}"
    names = [path.name for path in sorted(folder.iterdir())]
    stages = ["trace", "canonicalize", "partition", "stop_alone", "accumulate", "name_loops", "donate"]
    expected = [f"{number:02}_{name}" for number, name in enumerate([*stages, "stack_collectives"])]
    assert names == ["00_trace.after.txt"] + [
        f"{stem}.{which}.txt" for stem in expected[1:] for which in ("after", "before")
    ] + ["summary.txt"]
    summary = (folder / "summary.txt").read_text()
    assert re.search(r"^partition: \d+\.\d{3} s; .*\+\d all_gather", summary, re.MULTILINE)
    assert "  w @forward: gathers w for all layers at once, outside of the loop\n" in summary
    before, after = ((folder / f"07_stack_collectives.{which}.txt").read_text() for which in ("before", "after"))
    assert before in readable(traced(plan=PLAN).sharded, None) or "loop w @forward" in before
    assert after.startswith("stack_collectives: ")
