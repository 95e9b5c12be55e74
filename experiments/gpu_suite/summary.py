"""The results as Markdown: a table a section, of what one reads first, beside what the cost model has for it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.expected import with_expected
from experiments.gpu_suite.results import Results, SectionResult
from experiments.markdown import table

_SHOWN_ERROR = 160
"""Characters of an error in a table."""

_COLUMNS: dict[str, tuple[str, float, str]] = {
    "seconds": ("us", 1e-6, ".1f"),
    "flops_per_s": ("TFLOP/s", 1e12, ".0f"),
    "bytes_per_s": ("GB/s", 1e9, ".1f"),
    "size_bytes": ("MiB", 1 << 20, ".2f"),
    "expected_over_measured": ("expected / measured", 1.0, ".2f"),
    "period_s": ("period us", 1e-6, ".1f"),
    "kernel_s": ("kernel us", 1e-6, ".1f"),
    "gap_s": ("gap us", 1e-6, ".1f"),
    "kernels_s": ("kernels us", 1e-6, ".1f"),
    "together_s": ("together us", 1e-6, ".1f"),
    "hidden": ("hidden", 1.0, ".2f"),
    "measured_s": ("measured ms", 1e-3, ".2f"),
    "predicted_s": ("predicted ms", 1e-3, ".2f"),
    "predicted_over_measured": ("predicted / measured", 1.0, ".2f"),
    "step_s": ("step ms", 1e-3, ".2f"),
    "simulated_s": ("simulated ms", 1e-3, ".2f"),
    "simulated_over_measured": ("simulated / measured", 1.0, ".2f"),
    "xla_bytes": ("XLA GiB", 1 << 30, ".2f"),
    "simulated_bytes": ("simulated GiB", 1 << 30, ".2f"),
    "allocator_peak_bytes": ("allocator's peak GiB", 1 << 30, ".2f"),
    "first_loss": ("first loss", 1.0, ".4f"),
    "compile_s": ("compile s", 1.0, ".1f"),
    "params": ("billion parameters", 1e9, ".2f"),
    "tokens_per_s": ("tokens/s", 1.0, ".0f"),
    "xla_host_bytes": ("host GiB", 1 << 30, ".2f"),
    "to_host_bytes_per_s": ("to host GB/s", 1e9, ".1f"),
    "from_host_bytes_per_s": ("from host GB/s", 1e9, ".1f"),
    "together_bytes_per_s": ("both at once GB/s", 1e9, ".1f"),
    "losses": ("losses", 1.0, ".5f"),
    "compile_and_first_steps_s": ("compile and first steps s", 1.0, ".1f"),
    "relative_difference": ("largest relative difference of losses", 1.0, ".1e"),
}
"""Of figures by name: the head of their column, their unit there, and how they are written."""

_NOT_OF_ALL = {"expected_over_measured", "simulated_over_measured"}
"""What a row of a table may lack."""

_TABLES: dict[str, tuple[str, ...]] = {
    "matmul": ("m n k dtype form compiler seconds flops_per_s expected_over_measured",),
    "attention": ("model tokens implementation passes seconds flops_per_s expected_over_measured",),
    "memory": (
        "launched kernels period_s kernel_s gap_s",
        "kind size_bytes seconds bytes_per_s expected_over_measured",
    ),
    "host_copies": (
        "direction size_bytes seconds bytes_per_s expected_over_measured",
        "direction how seconds kernels_s together_s hidden simulated_over_measured",
    ),
    "llama_block": (
        "width untimed_ops measured_s predicted_s predicted_over_measured",
        "width kind ops measured_s predicted_s predicted_over_measured",
        "width name kind where measured_s predicted_s predicted_over_measured",
    ),
    "simulated_vs_measured": (
        "workload system step_s simulated_s simulated_over_measured xla_bytes simulated_bytes first_loss compile_s",
        "workload xla_bytes allocator_peak_bytes",
        "workload kind ops measured_s predicted_s predicted_over_measured",
        "workload name kind where measured_s predicted_s predicted_over_measured",
    ),
    "offload": (
        "system parameter_bytes params tokens_per_s step_s simulated_s simulated_over_measured losses compile_s",
        "system params xla_bytes simulated_bytes allocator_peak_bytes xla_host_bytes",
        "size_bytes to_host_bytes_per_s from_host_bytes_per_s together_bytes_per_s expected_over_measured",
    ),
    "two_processes": ("system losses compile_and_first_steps_s", "relative_difference step_s"),
}
"""By section, the tables of its rows; a table shows the rows that have all of its columns."""


def summary(results: Results) -> str:
    """The whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    head = [
        f"# One {results.device_kind}, measured {results.date}",
        "",
        f"`deepcompile bench --suite gpu`, sizes `{results.sizes}`. {versions}.",
    ]
    if results.sizes == "tiny":
        head += ["", "Sizes that only prove that the suite runs: the figures mean nothing."]
    return "\n".join([*head, *(_section(section, results.device_kind) for section in results.sections)]) + "\n"


def _section(section: SectionResult, device_kind: str) -> str:
    text = ["", f"## {section.name}", "", f"{section.status} after {section.seconds:.0f} s, {len(section.rows)} rows."]
    if section.error:
        text += ["", "```", section.error, "```"]
    rows = [with_expected(section.name, row, device_kind) for row in section.measured]
    if ratios := [row["expected_over_measured"] for row in rows if "expected_over_measured" in row]:
        least, median, most = min(ratios), statistics.median(ratios), max(ratios)
        text += ["", f"Expected / measured: median {median:.2f}, {least:.2f} to {most:.2f}."]
    for keys in map(str.split, _TABLES.get(section.name, ())):
        wanted = set(keys) - _NOT_OF_ALL
        shown = [[_shown(key, row.get(key)) for key in keys] for row in rows if row.keys() >= wanted]
        if shown:
            text += ["", *table([_COLUMNS[key][0] if key in _COLUMNS else key for key in keys], shown)]
    return "\n".join([*text, *_failures(section.rows)])


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(key, each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(_shown(key, each) for each in value)
    if key not in _COLUMNS or isinstance(value, str):
        return str(value)
    _, unit, form = _COLUMNS[key]
    return f"{value / unit:{form}}"


def _failures(rows: Iterable[Row]) -> list[str]:
    """Cases that failed, by the error, which is often the same."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        if "error" in row:
            case = " ".join(str(value) for key, value in row.items() if key != "error")
            text = str(row["error"]).replace("\n", " ").replace("|", "/")
            cases.setdefault(text[:_SHOWN_ERROR], []).append(case)
    return ["", *(f"* failed: {'; '.join(found)}: `{error}`" for error, found in cases.items())] if cases else []
