"""``deepcompile bench``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from experiments.bench import configs
from experiments.bench.rows import Benchmark, Results, load, measure
from experiments.bench.side_by_side import SideBySide
from experiments.validation import command as validation
from experiments.validation import confirm as confirmation
from experiments.validation.runs import RUNS
from jax_deepcompile.cli.outputs import require_writable
from jax_deepcompile.runtime.files import write_whole
from jax_deepcompile.runtime.modules import nearest_name
from jax_deepcompile.training.values import bounded

BENCHMARKS: Mapping[str, Benchmark] = {**configs.BENCHMARKS, "cpu": SideBySide()}

Row = Annotated[int, bounded(int, 0)]


def run(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None,
    *,
    list: bool = False,
    suite: Literal["gpu", "offload"] | None = None,
    out: Path | None = None,
    rows: tuple[Row, ...] = (),
    resume: bool = False,
    again: tuple[str, ...] = (),
) -> int:
    """Compiles and simulates whole train steps for GPUs that are not here, or measures on what is.

    Args:
      name: of the benchmark, such as headline.
      list: list the benchmarks.
      suite: measure the attached GPU instead, in under 8 minutes; offload trains a model that does not fit it.
      out: file for the results as JSON; a Markdown table is written beside it.
      rows: to measure, from 0; all where none is given.
      resume: keep what the output file holds already.
      again: systems to measure anew beside that, such as all.

    Returns:
      The exit code, 2 after one line about a mistake of the user's.
    """
    require_writable("--out", out, makes_folders=True)
    if suite is not None:
        from experiments.gpu_suite import suite as gpu_suite

        return gpu_suite.run(out or Path(f"{suite}.json"), {"gpu": "full"}.get(suite, suite))
    if list:
        for each, benchmark in BENCHMARKS.items():
            print(f"{each:<20}{benchmark.title} ({len(benchmark.workloads)} rows)")
        print(f"{'validation':<20}{validation.TITLE} ({len(RUNS)} rows)")
        print(f"{'confirm':<20}{confirmation.TITLE}")
        return 0
    if name == "confirm":
        return confirmation.confirm(out)
    if name == "validation":
        if any(row >= len(RUNS) for row in rows):
            return _mistake(f"validation has no row {max(rows)}: its rows are 0 to {len(RUNS) - 1}")
        validation.measure(out, rows or range(len(RUNS)), resume)
        return 0
    if name is None:
        return _mistake(f"say which benchmark: {', '.join(BENCHMARKS)}")
    if name not in BENCHMARKS:
        nearest = nearest_name(name, BENCHMARKS)
        return _mistake(f"there is no benchmark {name}" + (f"; the nearest is {nearest}" if nearest else ""))
    benchmark = BENCHMARKS[name]
    count, systems = len(benchmark.workloads), benchmark.system_names
    wrong = [row for row in rows if row >= count]
    if wrong:
        return _mistake(f"{name} has no row {wrong[0]}: its rows are 0 to {count - 1}")
    if (resume or again) and out is None:
        return _mistake("say which results to go on with: --out FILE")
    unknown = [system for system in again if system not in systems]
    if unknown:
        return _mistake(f"{name} has no system {unknown[0]!r}: its systems are {', '.join(systems)}")
    try:
        done = load(out, name, benchmark) if out is not None and (resume or again) else None
    except (ValueError, KeyError, TypeError) as error:
        return _mistake(f"{out} holds no results to go on with: {error}")
    _measure(name, out, rows or range(count), done, again)
    return 0


def _measure(name: str, out: Path | None, rows: Sequence[int], done: Results | None, again: Sequence[str]) -> None:
    benchmark, results = BENCHMARKS[name], done
    for latest, results in measure(name, benchmark, rows, done, again):
        step = f"{latest.figures.step_s:.3f} s" if latest.figures is not None else "does not fit"
        print(f"{latest.workload}, {latest.system}: {step}", file=sys.stderr, flush=True)
        _keep(results, out, benchmark)
    if results is not None:
        _keep(results, out, benchmark)
        print(benchmark.page(results), end="")


def _keep(results: Results, out: Path | None, benchmark: Benchmark) -> None:
    if out is not None:
        write_whole(out, results.to_json())
        write_whole(out.with_suffix(".md"), benchmark.page(results))


def _mistake(line: str) -> int:
    print(f"deepcompile: {line}", file=sys.stderr)
    return 2
