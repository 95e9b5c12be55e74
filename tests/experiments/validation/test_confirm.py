"""On CPU devices: that it runs, and says that it shows no more."""

from __future__ import annotations

import json

import pytest

from experiments.command import bench
from experiments.validation.confirm import Confirmed

pytestmark = pytest.mark.cpu_mesh


def test_jit_and_the_planned_step_run_and_are_written_down(tmp_path, capsys):
    out = tmp_path / "confirmed.json"
    assert bench(["confirm", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert [line.split(":")[0] for line in printed.out.splitlines()] == ["run 0, jit", "run 0, planned"]
    assert "their figures only show that this runs" in printed.err
    written = json.loads(out.read_text())
    assert (written["device"], written["count"]) == ("cpu", 8)
    assert all(step["measured_s"] > 0 and step["simulated_s"] > 0 for step in written["steps"])


def test_a_published_figure_stands_beside():
    line = Confirmed(1, "jit", 0.7, 0.75, 0.721).line
    assert line == "run 1, jit: simulated 0.7 s, measured 0.75 s (-6.7%), published 0.721 s"
