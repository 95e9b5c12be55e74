"""``deepcompile bench validation``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from experiments.validation.compare import Simulated, from_json, simulated, to_json
from experiments.validation.page import page, plot_svg
from experiments.validation.programs import compiled, mesh_of
from experiments.validation.runs import RUNS
from jax_deepcompile.runtime.files import write_whole

TITLE = "The simulator against training runs that others measured"


def measure(out: Path | None, rows: Sequence[int], resume: bool) -> None:
    """Compiles and simulates runs, by their places in ``RUNS``; results are written as they come.

    Args:
      out: file for the results as JSON, beside which the page and its plot are written.
      rows: which runs.
      resume: whether those that ``out`` has are kept.
    """
    kept = from_json(out.read_text()) if resume and out is not None and out.exists() else []
    done = {run.number: run for run in kept}
    for place in rows:
        run = RUNS[place]
        if run.number in done:
            continue
        began = time.monotonic()
        found = done[run.number] = simulated(run, compiled(run, mesh_of(run)))
        print(
            f"run {run.number}, {run.model}: {found.step_s:.3f} s, measured {run.measured_s:.3f} s "
            f"({found.error:+.1%}), in {time.monotonic() - began:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        if out is not None:
            write(out, [done[each.number] for each in RUNS if each.number in done])
    if out is None:
        print(page(list(done.values()), _today(), jax.__version__, "none"), end="")


def write(out: Path, runs: Sequence[Simulated]) -> None:
    """The results, the page and its plot, all beside ``out``."""
    plot = out.with_suffix(".svg")
    write_whole(out, to_json(runs, _today(), jax.__version__))
    write_whole(plot, plot_svg(runs))
    write_whole(out.with_suffix(".md"), page(runs, _today(), jax.__version__, plot.name))


def _today() -> str:
    return time.strftime("%Y-%m-%d")
