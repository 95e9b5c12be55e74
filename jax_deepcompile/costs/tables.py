"""Seconds of kernels as they were measured on one kind of device: frozen tables, JSON in the folder ``measured``.

The folder may be absent or empty; then there is no table, and ``hardware.py`` speaks alone.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable

from jax_deepcompile.costs import frozen_json
from jax_deepcompile.costs.entries import Direction
from jax_deepcompile.costs.hardware import Hardware

Points = Sequence[tuple[float, float]]
"""Pairs (size of the work, seconds) with sizes that increase and seconds that do not decrease."""

_LARGE_FLOPS = 1e11
"""A product of so many takes 0.1 ms and more at an H100's peak: launching it weighs little."""

_LARGE_BYTES = 1 << 28
"""Five times the 50 MB of an H100's second-level cache."""

_LARGE_COPY_BYTES = 1 << 26
"""1 ms at 64 GB/s: setting the copy up weighs little."""

_STREAMING = frozenset({"copy", "add", "cast"})
"""Kinds of memory kernels that read and write in order."""


@dataclass(frozen=True)
class MatmulTime:
    """One matrix product: an (m, k) times a (k, n) matrix.

    Attributes:
      m, n, k: as above.
      dtype: of the factors' elements, as in HLO: ``bf16``, or ``f32`` for what JAX runs by default.
      form: ``nn``; ``nt`` with the second factor stored as (n, k); ``tn`` with the first stored as (k, m).
      seconds: of one kernel, launch included.
    """

    m: int
    n: int
    k: int
    dtype: str
    form: str
    seconds: float

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class KernelTime:
    """One kernel without matrix products.

    Attributes:
      kind: ``copy``, ``add``, ``cast``, ``softmax``, ``reduction`` or ``transpose``.
      size_bytes: read and written in device memory, all told.
      seconds: launch included.
    """

    kind: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class CopyTime:
    """One copy of ``size_bytes`` between device memory and pinned host memory."""

    direction: Direction
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class KernelTable:
    """What was measured on one kind of device.

    Attributes:
      device_kind: as JAX names it.
      date: such as ``2026-11-21``.
      versions: pairs (name, version) of what compiled and ran the kernels.
      matmuls: the fastest implementation of each.
      kernels: the memory kernels.
      copies: between device and host.
      shortest_kernel_s: what a kernel takes that does almost nothing; None if it was not measured.
      kernel_launch_s: from the end of one kernel to the start of the next; None if it was not measured.
    """

    device_kind: str
    date: str
    versions: tuple[tuple[str, str], ...]
    matmuls: tuple[MatmulTime, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    shortest_kernel_s: float | None = None
    kernel_launch_s: float | None = None

    def __post_init__(self) -> None:
        if any(time.seconds <= 0 for time in (*self.matmuls, *self.kernels, *self.copies)):
            raise ValueError("an entry that takes no time")

    def to_json(self) -> str:
        return frozen_json.dump(self)

    @classmethod
    def from_json(cls, text: str, name: str = "the text given") -> KernelTable:
        """The table that ``to_json`` made ``text`` from.

        Raises:
          ValueError: it is none; ``name`` is what the error calls it.
        """
        try:
            return frozen_json.read(cls, frozen_json.parse(text))
        except ValueError as error:
            raise ValueError(
                f"{name} is not a table of measured kernels: {error}. Make it from the results of "
                f"deepcompile bench --suite gpu."
            ) from error


def rising_points(measured: Iterable[tuple[float, float]]) -> Points:
    """Points in order of size: of several with one size the median; more work never takes less time.

    Args:
      measured: pairs (size of the work, seconds).
    """
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, seconds in measured:
        by_size[size].append(seconds)
    points: list[tuple[float, float]] = []
    for size in sorted(by_size):
        least = points[-1][1] if points else 0.0
        points.append((size, max(least, statistics.median(by_size[size]))))
    return points


def seconds_at(points: Points, size: float) -> float:
    """Seconds for work of ``size``: straight between ``points`` in logarithms of both.

    Less than the smallest takes as long as that, as short kernels do; beyond the largest the rate stays.
    """
    sizes = [known for known, _ in points]
    after = bisect_left(sizes, size)
    if after == len(points):
        largest, seconds = points[-1]
        return seconds * (size / largest)
    high, high_s = points[after]
    if after == 0 or size == high:
        return high_s
    low, low_s = points[after - 1]
    share = math.log(size / low) / math.log(high / low)
    return min(high_s, low_s * (high_s / low_s) ** share)


def fitted_hardware(hardware: Hardware, table: KernelTable) -> Hardware:
    """``hardware`` with all that ``table`` tells of it: medians over what is large enough to show rates.

    What the table does not tell stays as it is. Fractions refer to the peaks of ``hardware``.
    """
    fitted = {
        "matmul_fraction": _matmul_fraction(hardware, table.matmuls),
        "memory_fraction": _memory_fraction(hardware, table.kernels),
        "kernel_launch_s": table.kernel_launch_s,
        "shortest_kernel_s": table.shortest_kernel_s,
        "to_host_bytes_per_s": _copy_bytes_per_s(table.copies, Direction.TO_HOST),
        "from_host_bytes_per_s": _copy_bytes_per_s(table.copies, Direction.FROM_HOST),
    }
    return replace(hardware, **{name: value for name, value in fitted.items() if value is not None})


def stored_tables(folder: Traversable | None = None) -> tuple[KernelTable, ...]:
    """The tables in ``folder``, by default those that come with the package; none if there is no such folder.

    Raises:
      ValueError: a file there is no table.
    """
    folder = files("jax_deepcompile.costs") / "measured" if folder is None else folder
    if not folder.is_dir():
        return ()
    found = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return tuple(KernelTable.from_json(file.read_text(), file.name) for file in found)


def latest_table(device_kind: str, tables: Iterable[KernelTable]) -> KernelTable | None:
    """The last one measured on ``device_kind``; None if there is none."""
    return max(
        (table for table in tables if table.device_kind == device_kind), key=lambda table: table.date, default=None
    )


def _matmul_fraction(hardware: Hardware, matmuls: Iterable[MatmulTime]) -> float | None:
    """In bfloat16, in which models are trained: the fraction is one number, and float32 attains another."""
    peak = hardware.matmul_flops_per_s.get("bf16")
    rates = [time.flops / time.seconds for time in matmuls if time.dtype == "bf16" and time.flops >= _LARGE_FLOPS]
    return statistics.median(rates) / peak if rates and peak else None


def _memory_fraction(hardware: Hardware, kernels: Iterable[KernelTime]) -> float | None:
    large = [time for time in kernels if time.kind in _STREAMING and time.size_bytes >= _LARGE_BYTES]
    rates = [time.size_bytes / time.seconds for time in large]
    return statistics.median(rates) / hardware.memory_bytes_per_s if rates else None


def _copy_bytes_per_s(copies: Iterable[CopyTime], direction: Direction) -> float | None:
    large = [time for time in copies if time.direction is direction and time.size_bytes >= _LARGE_COPY_BYTES]
    return statistics.median(time.size_bytes / time.seconds for time in large) if large else None
