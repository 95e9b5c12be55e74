"""A benchmark of steps that are compiled for GPUs that are not here, and simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax_deepcompile as deepcompile
from experiments.bench.rows import Result, Results
from experiments.bench.systems import Figures, System
from experiments.bench.table import page
from experiments.bench.workload import Cluster, Workload


@dataclass(frozen=True)
class Published:
    """Tokens a second and GPU that the DeepCompile paper published, on its own software and cluster of 32 H100s.

    Attributes:
      zero3: DeepSpeed ZeRO-3.
      fsdp: PyTorch FSDP.
      deepcompile: the paper's prefetching and selective unsharding.
    """

    zero3: int | None
    fsdp: int | None
    deepcompile: int


@dataclass(frozen=True)
class Simulated:
    """A ``Benchmark``.

    Attributes:
      title: what it shows.
      workloads: its rows.
      systems: of every row; the first is what the others are compared with.
      memory_limit: a GPU's, where planning has one to keep.
      published: the paper's figures for a workload.
    """

    title: str
    workloads: tuple[Workload, ...]
    systems: tuple[System, ...]
    memory_limit: str = "72GiB"
    published: Mapping[Workload, Published] | None = None

    @property
    def system_names(self) -> tuple[str, ...]:
        return tuple(system.name for system in self.systems)

    def measure(self, workload: Workload, wanted: Sequence[str]) -> Iterator[Result]:
        for system in self.systems:
            if system.name in wanted and system.trains(workload):
                yield _measured(workload, system, self.memory_limit)

    def read(self, entry: Mapping[str, Any]) -> Result:
        cluster = Cluster(**entry["workload"]["cluster"])
        figures = Figures(**entry["figures"]) if entry["figures"] is not None else None
        workload = Workload(**{**entry["workload"], "cluster": cluster})
        return Result(**{**entry, "workload": workload, "figures": figures})

    def page(self, results: Results) -> str:
        return page(results, self)


def _measured(workload: Workload, system: System, memory_limit: str) -> Result:
    try:
        figures = system.measure(workload, workload.cluster.make_mesh(), memory_limit)
    except deepcompile.errors.MemoryExceededError as error:
        return Result(workload, system.name, None, str(error))
    return Result(workload, system.name, figures)
