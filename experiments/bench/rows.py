"""Measures the rows of a benchmark one by one; what is done is kept, so that a run cut short can go on."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jax_deepcompile as deepcompile
from experiments.bench.commit import commit
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
      commit: of the code that it was measured with; empty where nobody knows.
    """

    workload: Workload
    system: str
    figures: Figures | None
    problem: str = ""
    commit: str = ""


@dataclasses.dataclass(frozen=True)
class Results:
    """A benchmark's results so far.

    Attributes:
      benchmark: its name.
      date: of the last result, as ISO 8601.
      jax: version.
      results: in the order of the benchmark's rows and systems; those that it no longer has come last.
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


def measure(
    name: str, benchmark: Benchmark, rows: Sequence[int], done: Results | None, again: Container[str] = ()
) -> Iterator[tuple[Result, Results]]:
    """Each further result, and all there are after it.

    Args:
      name: of the benchmark.
      benchmark: what to measure.
      rows: which of its workloads.
      done: results of an earlier run, which are not measured again.
      again: but for those of these systems, by name.
    """
    results = {(each.workload, each.system): each for each in (done.results if done is not None else ())}
    keys = [(workload, system.name) for workload in benchmark.workloads for system in benchmark.systems]
    keys += [key for key in results if key not in keys]
    measured_with = commit()
    for index in rows:
        workload = benchmark.workloads[index]
        for system in benchmark.systems:
            key = (workload, system.name)
            if (key in results and system.name not in again) or not system.trains(workload):
                continue
            found = _measured(workload, system, benchmark.memory_limit)
            results[key] = dataclasses.replace(found, commit=measured_with)
            ordered = tuple(results[each] for each in keys if each in results)
            yield results[key], Results(name, time.strftime("%Y-%m-%d"), jax.__version__, ordered)


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
    return Result(**found | {"workload": workload, "figures": figures})
