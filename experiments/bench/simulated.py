"""A benchmark of steps that are compiled for GPUs that are not here, and simulated: a page with all it rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax_deepcompile as deepcompile
from experiments.bench.rows import Result, Results
from experiments.bench.systems import MEMORY_LIMIT, Figures, System
from experiments.bench.workload import Cluster, Workload
from experiments.markdown import table
from jax_deepcompile.runtime.progress import Progress

_COLUMNS = (
    "model",
    "GPUs",
    "NICs a node",
    "seq",
    "batch",
    "acc.",
    "system",
    "step s",
    "x jit",
    "tokens/s/GPU",
    "MFU %",
    "compute s",
    "comm. s",
    "exposed s",
    "bound s",
    "peak GiB",
    "host GiB",
    "copies exposed s",
    "compile s",
    "plan s",
    "warm s",
    "commit",
)


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
      published: the paper's figures for a workload.
      notes: paragraphs under the table.
    """

    title: str
    workloads: tuple[Workload, ...]
    systems: tuple[System, ...]
    published: Mapping[Workload, Published] | None = None
    notes: tuple[str, ...] = ()

    @property
    def system_names(self) -> tuple[str, ...]:
        return tuple(system.name for system in self.systems)

    def measure(self, workload: Workload, wanted: Sequence[str]) -> Iterator[Result]:
        for system in self.systems:
            if system.name in wanted and system.trains(workload):
                yield _measured(workload, system)

    def read(self, entry: Mapping[str, Any]) -> Result:
        cluster = Cluster(**entry["workload"]["cluster"])
        figures = Figures(**entry["figures"]) if entry["figures"] is not None else None
        workload = Workload(**{**entry["workload"], "cluster": cluster})
        return Result(**{**entry, "workload": workload, "figures": figures})

    def page(self, results: Results) -> str:
        """The whole page: title, command, what is simulated by which constants, and the rows."""
        lines = [f"# {self.title}: simulated, {results.date}", "", *_statement(results), ""]
        first, rows = {each.workload: each for each in reversed(results.results)}, []
        for result in results.results:
            rows.append(_cells(result, first[result.workload]))
            if result.system == self.systems[-1].name:
                rows += _published_rows(result.workload, self.published or {})
        problems = [each for each in results.results if each.figures is None]
        notes = [line for note in self.notes for line in ("", note)]
        return "\n".join([*lines, *table(_COLUMNS, rows), *notes, *_notes(problems)]) + "\n"


def _measured(workload: Workload, system: System) -> Result:
    try:
        with Progress(f"{workload}, {system.name}"):
            figures = system.measure(workload, workload.cluster.make_mesh())
    except deepcompile.errors.MemoryExceededError as error:
        return Result(workload, system.name, None, str(error))
    return Result(workload, system.name, figures)


def _statement(results: Results) -> list[str]:
    """What is simulated, with every constant."""
    made = {each.workload.cluster.gpu for each in results.results}
    lines = [
        f"`deepcompile bench {results.benchmark} --out FILE`, jax {results.jax}. Nothing was run: each step was",
        "compiled by XLA:GPU for GPUs that are not attached, and simulated from its scheduled HLO: products, attention",
        "and collectives by the published tables in `jax_deepcompile/costs/published`, the rest by these constants.",
        "`x jit` compares with the first system of a row; `comm.` is the network's busy time, `exposed` the part that",
        "compute waited for, `bound` what no schedule of the same operations beats, `peak` XLA's own figure (in",
        "bold if a GPU has less: such a step would not run), `warm` planning with the plan kept from an earlier run,",
        "`commit` the code that was measured, where the results say so. MFU counts matrix products as written, without",
        "recomputation, and of cuDNN's attention what its mask shows, over the data sheet's bfloat16 peak.",
        f"Planned steps keep to {MEMORY_LIMIT} a GPU, or what their name says.",
        "",
    ]
    for gpu in sorted(made):
        target = getattr(deepcompile.targets, gpu)()
        lines += _constants(gpu.upper(), target.hardware) + _constants("Side by side", target.overlap)
    lines += _constants("Network", deepcompile.targets.h100().network)
    return lines


def _constants(name: str, constants: object) -> list[str]:
    parts = []
    for field in dataclasses.fields(constants):  # pyright: ignore[reportArgumentType]
        value = getattr(constants, field.name)
        if isinstance(value, dict):
            parts += [f"{field.name}[{key}] {each:.4g}" for key, each in value.items()]
        else:
            parts.append(f"{field.name} {value:.4g}" if isinstance(value, float) else f"{field.name} {value}")
    return [f"* {name}: {', '.join(parts)}."]


def _cells(result: Result, first: Result) -> tuple[str, ...]:
    load, found = result.workload, result.figures
    row = (
        load.model,
        str(load.cluster.gpus),
        load.cluster.network,
        str(load.sequence),
        str(load.batch),
        str(load.microbatches),
        result.system,
    )
    if found is None:
        return (*row, "does not fit", *("",) * (len(_COLUMNS) - len(row) - 2), result.commit)
    speedup = f"{first.figures.step_s / found.step_s:.2f}" if first.figures is not None else ""
    return (
        *row,
        f"{found.step_s:.3f}",
        speedup,
        f"{load.tokens_per_gpu / found.step_s:.0f}",
        f"{100 * found.mfu:.1f}",
        f"{found.compute_s:.3f}",
        f"{found.communication_s:.3f}",
        f"{found.exposed_s:.3f}",
        f"{found.bound_s:.3f}",
        _peak(found.peak_gib, load.cluster.gpu),
        f"{found.host_gib:.1f}" if found.host_gib else "",
        f"{found.exposed_copy_s:.3f}" if found.host_gib else "",
        f"{found.compile_s:.0f}",
        f"{found.plan_s:.0f}",
        f"{found.warm_plan_s:.1f}",
        result.commit,
    )


def _peak(peak_gib: float, gpu: str) -> str:
    over = peak_gib * 2**30 > getattr(deepcompile.targets, gpu)().hardware.memory_bytes
    return f"**{peak_gib:.1f}**" if over else f"{peak_gib:.1f}"


def _published_rows(workload: Workload, published: Mapping[Workload, Published]) -> list[tuple[str, ...]]:
    """The paper's own figures beside the row they belong to."""
    found = published.get(dataclasses.replace(workload, cluster=Cluster()))
    if found is None:
        return []
    names = {"ZeRO-3": found.zero3, "FSDP": found.fsdp, "DeepCompile": found.deepcompile}
    load = workload
    row = (load.model, "32", "", str(load.sequence), str(load.batch), str(load.microbatches))
    return [
        (*row, f"*published: {name}*", "", "", f"*{tokens}*", *("",) * 12)
        for name, tokens in names.items()
        if tokens is not None
    ]


def _notes(problems: list[Result]) -> list[str]:
    if not problems:
        return []
    return ["", "Does not fit:", "", *(f"* {each.system}: {each.problem}" for each in problems)]
