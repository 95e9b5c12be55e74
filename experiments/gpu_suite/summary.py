"""The results as Markdown: a table a section, of what one reads first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.results import Results, SectionResult

_SHOWN_ERROR = 160
"""Characters of an error in a table."""


@dataclass(frozen=True)
class Column:
    """``head`` of a column, and what stands in it for a row; rows that lack it show nothing."""

    head: str
    key: str
    show: Callable[[object], str] = str


def summary(results: Results) -> str:
    """The whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    head = [
        f"# One {results.device_kind}, measured {results.date}",
        "",
        f"`deepcompile bench --suite gpu`, sizes `{results.sizes}`. {versions}.",
    ]
    if results.sizes != "full":
        head += ["", "Sizes that only prove that the suite runs: the figures mean nothing."]
    return "\n".join([*head, *(_section(section) for section in results.sections)]) + "\n"


def _section(section: SectionResult) -> str:
    text = ["", f"## {section.name}", "", f"{section.status} after {section.seconds:.0f} s, {len(section.rows)} rows."]
    if section.error:
        text += ["", "```", section.error, "```"]
    for columns in _TABLES.get(section.name, ()):
        shown = [row for row in section.measured if all(column.key in row for column in columns)]
        if shown:
            text += ["", *_table(columns, shown)]
    return "\n".join([*text, *_failures(section.rows)])


def _table(columns: Sequence[Column], rows: Iterable[Row]) -> list[str]:
    lines = ["| " + " | ".join(column.head for column in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = ["" if row[column.key] is None else column.show(row[column.key]) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _failures(rows: Iterable[Row]) -> list[str]:
    """Cases that failed, by the error, which is often the same."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        if "error" in row:
            case = " ".join(str(value) for key, value in row.items() if key != "error")
            text = str(row["error"]).replace("\n", " ").replace("|", "/")
            cases.setdefault(text[:_SHOWN_ERROR], []).append(case)
    return ["", *(f"* failed: {'; '.join(found)}: `{error}`" for error, found in cases.items())] if cases else []


def _scaled(unit: float, digits: int) -> Callable[[object], str]:
    return lambda value: f"{value / unit:.{digits}f}" if isinstance(value, (int, float)) else str(value)


def _losses(values: object) -> str:
    return ", ".join(f"{value:.5f}" for value in values) if isinstance(values, list) else str(values)


def _by_system(values: object) -> str:
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{name} {_MILLISECONDS(seconds)} ms" for name, seconds in values.items())


_MICROSECONDS = _scaled(1e-6, 1)
_MILLISECONDS = _scaled(1e-3, 2)
_TFLOPS = _scaled(1e12, 0)
_GIGABYTES = _scaled(1e9, 1)
_MIB = _scaled(1 << 20, 2)
_GIB = _scaled(1 << 30, 2)
_RATIO = _scaled(1.0, 2)

_COMPARED = (
    Column("measured ms", "measured_s", _MILLISECONDS),
    Column("predicted ms", "predicted_s", _MILLISECONDS),
    Column("predicted / measured", "predicted_over_measured", _RATIO),
)

_TABLES: dict[str, tuple[tuple[Column, ...], ...]] = {
    "matmul": (
        (
            Column("m", "m"),
            Column("n", "n"),
            Column("k", "k"),
            Column("dtype", "dtype"),
            Column("form", "form"),
            Column("compiler", "compiler"),
            Column("us", "seconds", _MICROSECONDS),
            Column("TFLOP/s", "flops_per_s", _TFLOPS),
        ),
    ),
    "attention": (
        (
            Column("model", "model"),
            Column("tokens", "tokens"),
            Column("implementation", "implementation"),
            Column("passes", "passes"),
            Column("us", "seconds", _MICROSECONDS),
            Column("TFLOP/s", "flops_per_s", _TFLOPS),
        ),
    ),
    "memory": (
        (
            Column("tiny kernels", "launched"),
            Column("in a row", "kernels"),
            Column("period us", "period_s", _MICROSECONDS),
            Column("kernel us", "kernel_s", _MICROSECONDS),
            Column("gap us", "gap_s", _MICROSECONDS),
        ),
        (
            Column("kernel", "kind"),
            Column("MiB read and written", "size_bytes", _MIB),
            Column("us", "seconds", _MICROSECONDS),
            Column("GB/s", "bytes_per_s", _GIGABYTES),
        ),
    ),
    "host_copies": (
        (
            Column("direction", "direction"),
            Column("MiB", "size_bytes", _MIB),
            Column("ms", "seconds", _MILLISECONDS),
            Column("GB/s", "bytes_per_s", _GIGABYTES),
        ),
        (
            Column("direction", "direction"),
            Column("MiB", "size_bytes", _MIB),
            Column("copy ms", "seconds", _MILLISECONDS),
            Column("products ms", "products_s", _MILLISECONDS),
            Column("together ms", "together_s", _MILLISECONDS),
            Column("hidden", "hidden", _RATIO),
        ),
    ),
    "llama_block": (
        (Column("width", "width"), Column("step; ops not timed", "untimed_ops"), *_COMPARED),
        (Column("width", "width"), Column("kind", "kind"), Column("ops", "ops"), *_COMPARED),
        (
            Column("width", "width"),
            Column("op", "name"),
            Column("kind", "kind"),
            Column("where", "where"),
            *_COMPARED,
        ),
    ),
    "simulated_vs_measured": (
        (
            Column("workload", "workload"),
            Column("system", "system"),
            Column("step ms", "step_s", _MILLISECONDS),
            Column("simulated ms", "simulated_s", _MILLISECONDS),
            Column("simulated / measured", "simulated_over_measured", _RATIO),
            Column("XLA GiB", "xla_bytes", _GIB),
            Column("simulated GiB", "simulated_bytes", _GIB),
            Column("first loss", "first_loss", _scaled(1.0, 4)),
            Column("compile s", "compile_s", _scaled(1.0, 1)),
        ),
        (
            Column("workload", "workload"),
            Column("XLA GiB", "xla_bytes", _GIB),
            Column("allocator's peak GiB", "allocator_peak_bytes", _GIB),
        ),
    ),
    "two_processes": (
        (
            Column("system", "system"),
            Column("losses", "losses", _losses),
            Column("compile and first steps s", "compile_and_first_steps_s", _scaled(1.0, 1)),
        ),
        (
            Column("largest relative difference of losses", "relative_difference", "{:.1e}".format),
            Column("a step", "step_s", _by_system),
        ),
    ),
}
"""By section, the tables of its rows; a table shows the rows that have all of its columns."""
