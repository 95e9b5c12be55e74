"""A benchmark of steps that run here, on virtual CPU devices, side by side; see ``experiments.cpu_side_by_side``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from experiments.bench.rows import Result, Results
from experiments.cpu_side_by_side import ROUNDS, SMALL_ELEMENTS, SMALL_WHOLE, WORKLOADS, Figures, measure
from experiments.markdown import table
from jax_deepcompile.cli.steps import use_virtual_devices
from jax_deepcompile.runtime.quiet import start_backends

DEVICES = 8

MIB = 1 << 20

_COLUMNS = (
    "workload",
    "system",
    "step ms",
    "x jit",
    "95 % interval",
    "collectives",
    "MiB sent",
    "x jit",
    "compile s",
    "commit",
)


@dataclass(frozen=True)
class SideBySide:
    """A ``Benchmark``; its workloads are names in ``WORKLOADS``."""

    title: str = f"Small models on {DEVICES} virtual CPU devices, measured"
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    system_names: tuple[str, ...] = ("jit", SMALL_WHOLE, "fully sharded", "planned")

    def measure(self, workload: str, wanted: Sequence[str]) -> Iterator[Result]:
        """All systems, which take turns."""
        use_virtual_devices(DEVICES)
        jax.config.update("jax_platforms", "cpu")
        start_backends()
        mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))
        for system, figures in measure(workload, mesh).items():
            yield Result(workload, system, figures)
        jax.clear_caches()

    def read(self, entry: Mapping[str, Any]) -> Result:
        return Result(**{**entry, "figures": Figures(**entry["figures"])})

    def page(self, results: Results) -> str:
        lines = [
            f"# {self.title} {results.date}",
            "",
            f"`deepcompile bench {results.benchmark} --out FILE`, jax {results.jax}. Medians of {ROUNDS} steps of each",
            "system, which take turns. `x jit` of a step is the median ratio to the `jit` step of the same round, with",
            "its bootstrap interval. `MiB sent` is what one device sends in the collectives of a step, each done as a",
            f"ring. `{SMALL_WHOLE}` has all of each leaf of up to {SMALL_ELEMENTS} elements on every device.",
            "",
            *(_compared(results.results, name) for name in ("jit", SMALL_WHOLE)),
            "",
            *table(_COLUMNS, map(_cells, results.results)),
        ]
        return "\n".join(lines) + "\n"


def _compared(results: Sequence[Result], reference: str) -> str:
    """The planned steps beside those of ``reference``: the median ratio in the same round, over all workloads."""
    taken = {(result.workload, result.system): np.array(result.figures.all_step_s) for result in results}
    pairs = [
        (steps, taken.get((workload, reference))) for (workload, name), steps in taken.items() if name == "planned"
    ]
    ratios = [float(np.median(steps / others)) for steps, others in pairs if others is not None]
    if not ratios:
        return f"`planned` beside `{reference}`: not measured."
    mean, largest = statistics.geometric_mean(ratios), max(ratios)
    return f"`planned` beside `{reference}`: {mean:.3f} x by geometric mean of {len(ratios)}, {largest:.3f} x at most."


def _cells(result: Result) -> tuple[str, ...]:
    found: Figures = result.figures
    return (
        result.workload,
        result.system,
        f"{1e3 * found.step_s:.1f}",
        f"{found.ratio_to_jit:.3f}",
        f"{found.ratio_low:.3f} to {found.ratio_high:.3f}",
        str(sum(kind["count"] for kind in found.collectives.values())),
        f"{found.sent_bytes / MIB:.2f}",
        f"{found.sent_to_jit:.3f}",
        f"{found.compile_s:.1f}",
        result.commit,
    )
