"""Measuring seconds, and saying when it was done."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import jax

from jax_deepcompile.costs.entries import Method, Source

T = TypeVar("T")


def measured(runs: int, note: str = "") -> Source:
    """The source of a figure measured today, the median of ``runs``."""
    return Source(Method.MEASURED, datetime.date.today().isoformat(), runs, note)


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Seconds from calling ``run`` until the arrays it returns are there; and these."""
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - start, result


def median_seconds(run: Callable[[], object], runs: int) -> float:
    """The median over ``runs`` calls, after one that does not count."""
    timed(run)
    return statistics.median(timed(run)[0] for _ in range(runs))


def reason(error: Exception) -> str:
    """The first line of an error's message, with its class."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
