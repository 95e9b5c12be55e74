"""The page itself: its data inside of a template, with the library that draws it; nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.plan import Prediction, Record
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report.page.placements import leaves
from jax_deepcompile.report.page.runs import Run, run_data
from jax_deepcompile.report.planning import Decisions, decisions_of
from jax_deepcompile.summary import Summarized, Summary, size_text

BEFORE, AFTER = "as divided", "planned"


@dataclass(frozen=True, repr=False)
class Page(Summarized):
    """A page about a step: ``write`` it, and open the file.

    Attributes:
      title: what it is about.
      data: all that it draws, as JSON has it.
    """

    title: str
    data: Mapping[str, Any]

    def html(self) -> str:
        """The whole of it. Whatever names and paths hold, they are text."""
        parts = {
            "title": html.escape(self.title),
            "style": _static("uPlot.min.css") + _static("page.css"),
            "data": _inside_script(json.dumps(self.data, separators=(",", ":"), allow_nan=False)),
            "library": f"/*! {_static('uPlot.LICENSE')} */\n{_static('uPlot.iife.min.js')}",
            "script": "".join(_static(name) for name in ("data.js", "charts.js", "page.js")),
        }
        pieces = _static("page.html").split("%%")
        return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))

    def write(self, path: str | os.PathLike) -> Path:
        """Writes it to ``path``, which is returned."""
        Path(path).write_text(self.html(), encoding="utf-8")
        return Path(path)

    def _summary(self) -> Summary:
        runs = ", ".join(run["name"] for run in self.data["runs"])
        return Summary(f"Page {self.title}", (("runs", runs), ("size", size_text(len(self.html())))))


def page_of(
    planned: Planned,
    divided: Program,
    runs: Mapping[str, Run],
    devices: str,
    device: str,
) -> Page:
    """The page about a planned step.

    Args:
      divided: its program in the local view, before any change.
      runs: steps simulated, by what to call them; the last is ``planned``, as it will run, and at first stands beside
        the first.
      devices: what kind they are.
      device: what one of them is called.
    """
    program, plan = planned.program, planned.plan
    drawn = [run_data(name, run) for name, run in runs.items()]
    if plan.prediction is not None:
        drawn[-1]["figures"]["assigned_bytes"] = plan.prediction.peak_bytes
    data = {
        "device": device,
        "devices": f"{program.mesh.devices.size} x {devices}",
        "origin": planned.origin,
        "limit_bytes": planned.limit_bytes,
        "runs": drawn,
        "shown": [len(drawn) - 1, 0],
        "decisions": list(_decisions(decisions_of(planned))),
        "records": [_record(record) for record in plan.records],
        "leaves": list(leaves(program, divided)),
    }
    return Page(f"{program.name} on {program.mesh_text}", data)


def ways(planned: Planned) -> dict[str, Simulation]:
    """The step before any change, after each, and after all, by names; empty where nobody simulated it."""
    names = [BEFORE, *(f"after {place}. {name}" for place, (name, _) in enumerate(planned.way[1:], 1))]
    return dict(zip([*names[:-1], AFTER], (step for _, step in planned.way), strict=True)) if planned.way else {}


def _decisions(made: Decisions) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What each change brought, by what it is called; what none did comes first."""
    if made.first or not made.changes:
        yield "given with the plan" if made.edited_s else "before any change", made.first or made.decisions
    for place, each in enumerate(made.changes, 1):
        yield f"{place}. {each.strategy}, {each.gain}", each.decisions


def _record(record: Record) -> dict[str, Any]:
    def figures(prediction: Prediction | None) -> list[float] | None:
        return None if prediction is None else [prediction.step_s, prediction.peak_bytes]

    said = {name: getattr(record, name) for name in ("strategy", "decision", "accepted", "reason")}
    return said | {"before": figures(record.before), "after": figures(record.after)}


def _inside_script(text: str) -> str:
    """JSON that ends no script and opens no comment, whatever is in it."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _static(name: str) -> str:
    return (files("jax_deepcompile.report.page") / "static" / name).read_text(encoding="utf-8")
