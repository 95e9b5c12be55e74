"""Turns the results of a run into a table that ``jax_deepcompile.costs.tables`` reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.results import Results
from jax_deepcompile.costs.entries import Direction
from jax_deepcompile.costs.tables import CopyTime, KernelTable, KernelTime, MatmulTime
from jax_deepcompile.runtime.files import write_whole


def kernel_table(results: Results) -> KernelTable:
    """What ``results`` say of single kernels; sections that failed leave their part of the table empty."""
    memory = results.section("memory").measured
    shortest_s, launch_s = _shortest(row for row in memory if row["kind"] == "tiny")
    return KernelTable(
        results.device_kind,
        results.date,
        tuple(results.versions.items()),
        matmuls=_matmuls(results.section("matmul").measured),
        kernels=tuple(
            KernelTime(row["kind"], row["size_bytes"], row["seconds"]) for row in memory if row["kind"] != "tiny"
        ),
        copies=tuple(
            CopyTime(Direction(row["direction"]), row["size_bytes"], row["seconds"])
            for row in results.section("host_copies").measured
            if row["how"] == "alone"
        ),
        shortest_kernel_s=shortest_s,
        kernel_launch_s=launch_s,
    )


def write_table(results_file: Path, folder: Path) -> Path:
    """The table of the results in ``results_file``, written to ``folder``; returns the new file.

    Raises:
      ValueError: they are of no GPU, or of sizes that mean nothing.
    """
    results = Results.from_json(results_file.read_text())
    if results.sizes != "full":
        raise ValueError(f"{results_file} has figures of the sizes {results.sizes}, and a table needs those of full")
    path = folder / f"{file_stem(results)}.json"
    write_whole(path, kernel_table(results).to_json() + "\n")
    return path


def file_stem(results: Results) -> str:
    """Such as ``nvidia_h100_80gb_hbm3_2026-11-21``."""
    device = re.sub(r"[^a-z0-9]+", "_", results.device_kind.lower()).strip("_")
    return f"{device}_{results.date}"


def _shortest(rows: Iterable[Row]) -> tuple[float | None, float | None]:
    """Seconds of a tiny kernel and of the gap after it, launched the faster way; the trace may know of one way only."""
    found = list(rows)
    kernels_s = [row["kernel_s"] for row in found if row["kernel_s"] is not None]
    if not kernels_s:
        return None, None
    return min(kernels_s), max(0.0, min(row["period_s"] for row in found) - min(kernels_s))


def _matmuls(rows: Iterable[Row]) -> tuple[MatmulTime, ...]:
    """The faster of what computed the same product, as XLA would have chosen it."""
    fastest: dict[tuple, float] = {}
    for row in rows:
        key = row["m"], row["n"], row["k"], row["dtype"], row["form"]
        fastest[key] = min(row["seconds"], fastest.get(key, row["seconds"]))
    return tuple(MatmulTime(*key, seconds=seconds) for key, seconds in fastest.items())
