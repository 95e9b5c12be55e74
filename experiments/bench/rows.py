"""Measures the rows of a benchmark one by one; what is done is kept, so that a run cut short can go on."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from experiments.bench.commit import commit


@dataclasses.dataclass(frozen=True)
class Result:
    """One system on one workload.

    Attributes:
      workload: the row.
      system: its name.
      figures: of one step, among them its seconds ``step_s``; None if they could not be had.
      problem: why not.
      commit: of the code that it was measured with; empty where nobody knows.
    """

    workload: Any
    system: str
    figures: Any
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
    def from_json(cls, text: str, read: Callable[[Mapping[str, Any]], Result]) -> Results:
        found = json.loads(text)
        return cls(**found | {"results": tuple(map(read, found["results"]))})


class Benchmark(Protocol):
    """A table of ``workloads``, its rows, each on every system; the first is what the others are compared with."""

    @property
    def title(self) -> str: ...
    @property
    def workloads(self) -> Sequence[Any]: ...
    @property
    def system_names(self) -> Sequence[str]: ...

    def measure(self, workload: Any, wanted: Sequence[str]) -> Iterator[Result]:
        """The results of these systems, as they come; others, too, if they cannot be had without."""
        ...

    def read(self, entry: Mapping[str, Any]) -> Result:
        """A result from JSON."""
        ...

    def page(self, results: Results) -> str:
        """In Markdown."""
        ...


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
    keys = [(workload, system) for workload in benchmark.workloads for system in benchmark.system_names]
    keys += [key for key in results if key not in keys]
    measured_with = commit()
    for workload in (benchmark.workloads[index] for index in rows):
        wanted = [name for name in benchmark.system_names if (workload, name) not in results or name in again]
        for found in benchmark.measure(workload, wanted) if wanted else ():
            result = results[workload, found.system] = dataclasses.replace(found, commit=measured_with)
            ordered = tuple(results[each] for each in keys if each in results)
            yield result, Results(name, time.strftime("%Y-%m-%d"), jax.__version__, ordered)


def load(path: Path, name: str, benchmark: Benchmark) -> Results | None:
    """Earlier results of the same benchmark with the same jax in ``path``, if it holds any."""
    if not path.exists():
        return None
    found = Results.from_json(path.read_text(), benchmark.read)
    return found if (found.benchmark, found.jax) == (name, jax.__version__) else None
