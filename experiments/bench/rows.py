"""Measures the rows of a benchmark one by one; what is done is kept, so that a run cut short can go on."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jax_deepcompile as deepcompile
from experiments.bench.configs import Benchmark
from experiments.bench.systems import Figures, System
from experiments.bench.workload import Cluster, Workload


@dataclasses.dataclass(frozen=True)
class Result:
    """One system on one workload.

    Attributes:
      workload: the row.
      system: its name.
      figures: None if it could not be had.
      problem: why not.
    """

    workload: Workload
    system: str
    figures: Figures | None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Results:
    """A benchmark's results so far.

    Attributes:
      benchmark: its name.
      date: of the last result, as ISO 8601.
      jax: version.
      results: in the order of measurement.
    """

    benchmark: str
    date: str
    jax: str
    results: tuple[Result, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Results:
        found = json.loads(text)
        return cls(**found | {"results": tuple(map(_result, found["results"]))})


def measure(name: str, benchmark: Benchmark, rows: Sequence[int], done: Results | None) -> Iterator[Results]:
    """The results after each further system and row.

    Args:
      name: of the benchmark.
      benchmark: what to measure.
      rows: which of its workloads.
      done: results of an earlier run, which are not measured again.
    """
    results = done.results if done is not None else ()
    known = {(each.workload, each.system) for each in results}
    for index in rows:
        workload = benchmark.workloads[index]
        for system in benchmark.systems:
            if (workload, system.name) in known or not system.trains(workload):
                continue
            results = (*results, _measured(workload, system, benchmark.memory_limit))
            yield Results(name, time.strftime("%Y-%m-%d"), jax.__version__, results)


def load(path: Path, name: str) -> Results | None:
    """Earlier results of the same benchmark with the same jax in ``path``, if it holds any."""
    if not path.exists():
        return None
    found = Results.from_json(path.read_text())
    return found if (found.benchmark, found.jax) == (name, jax.__version__) else None


def _measured(workload: Workload, system: System, memory_limit: str) -> Result:
    try:
        figures = system.measure(workload, workload.cluster.make_mesh(), memory_limit)
    except deepcompile.errors.MemoryExceededError as error:
        return Result(workload, system.name, None, str(error))
    return Result(workload, system.name, figures)


def _result(found: dict[str, Any]) -> Result:
    workload = Workload(**found["workload"] | {"cluster": Cluster(**found["workload"]["cluster"])})
    figures = Figures(**found["figures"]) if found["figures"] is not None else None
    return Result(workload, found["system"], figures, found["problem"])
