"""The results of a simulated benchmark as Markdown, with all they rest on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax_deepcompile as deepcompile
from experiments.bench.rows import Result, Results
from experiments.bench.workload import Workload
from experiments.markdown import table

if TYPE_CHECKING:
    from experiments.bench.simulated import Simulated

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
    "compile s",
    "plan s",
    "warm s",
    "commit",
)


def page(results: Results, benchmark: Simulated) -> str:
    """The whole page: title, command, what is simulated by which constants, and the rows."""
    lines = [f"# {benchmark.title}: simulated, {results.date}", "", *_statement(results, benchmark), ""]
    first, rows = {each.workload: each for each in reversed(results.results)}, []
    for result in results.results:
        rows.append(_cells(result, first[result.workload]))
        if result.system == benchmark.systems[-1].name:
            rows += _published(result.workload, benchmark)
    problems = [each for each in results.results if each.figures is None]
    return "\n".join([*lines, *table(_COLUMNS, rows), *_notes(problems)]) + "\n"


def _statement(results: Results, benchmark: Simulated) -> list[str]:
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
        f"Planned steps keep to {benchmark.memory_limit} a GPU.",
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
        f"{found.compile_s:.0f}",
        f"{found.plan_s:.0f}",
        f"{found.warm_plan_s:.1f}",
        result.commit,
    )


def _peak(peak_gib: float, gpu: str) -> str:
    over = peak_gib * 2**30 > getattr(deepcompile.targets, gpu)().hardware.memory_bytes
    return f"**{peak_gib:.1f}**" if over else f"{peak_gib:.1f}"


def _published(workload: Workload, benchmark: Simulated) -> list[tuple[str, ...]]:
    """The paper's own figures beside the row they belong to."""
    found = (benchmark.published or {}).get(dataclasses.replace(workload, cluster=type(workload.cluster)()))
    if found is None:
        return []
    names = {"ZeRO-3": found.zero3, "FSDP": found.fsdp, "DeepCompile": found.deepcompile}
    load = workload
    row = (load.model, "32", "", str(load.sequence), str(load.batch), str(load.microbatches))
    return [
        (*row, f"*published: {name}*", "", "", f"*{tokens}*", *("",) * 10)
        for name, tokens in names.items()
        if tokens is not None
    ]


def _notes(problems: list[Result]) -> list[str]:
    if not problems:
        return []
    return ["", "Does not fit:", "", *(f"* {each.system}: {each.problem}" for each in problems)]
