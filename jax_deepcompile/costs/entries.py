"""The entries of a profile: what was measured or read, each saying how it was obtained."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import StrEnum


class Method(StrEnum):
    """How an entry was obtained."""

    MEASURED = "measured"
    COMPILED = "compiled"
    ANALYTICAL = "analytical"


@dataclass(frozen=True)
class Source:
    """How an entry was obtained.

    Attributes:
      method: ``MEASURED`` on the machine, ``COMPILED``: read from XLA's result, or ``ANALYTICAL``: not obtained at all,
        so that the analytical model stands in.
      date: of the measurement, such as ``2026-11-21``; empty if there was none.
      runs: how many measurements the figure is the median of.
      note: why it could not be measured, or what to know about the figure.
    """

    method: Method
    date: str = ""
    runs: int = 0
    note: str = ""

    def __str__(self) -> str:
        measured = f" {self.date}, median of {self.runs}" if self.method is Method.MEASURED else ""
        return f"{self.method}{measured}" + (f": {self.note}" if self.note else "")


def analytical(reason: str) -> Source:
    """The source of an entry that could not be measured because of ``reason``."""
    return Source(Method.ANALYTICAL, note=reason)


@dataclass(frozen=True)
class Axis:
    """One mesh axis.

    Attributes:
      name: as in the mesh.
      size: devices along it.
      hosts: processes that the devices along it belong to; 1 where it stays within a machine.
    """

    name: str
    size: int
    hosts: int = 1


@dataclass(frozen=True)
class Machine:
    """What collectives and copies depend on.

    Attributes:
      device_kind: as JAX names it.
      axes: the mesh.
      versions: pairs (package, version) of what compiles and runs the step.
      network: the network cards of a node, such as ``1 x 400 Gbit/s a node``; empty for what is assumed of GPUs whose
        network nobody describes.
    """

    device_kind: str
    axes: tuple[Axis, ...]
    versions: tuple[tuple[str, str], ...]
    network: str = ""

    def __str__(self) -> str:
        axes = ", ".join(
            f"{axis.name}={axis.size}" + f" on {axis.hosts} hosts" * (axis.hosts > 1) for axis in self.axes
        )
        versions = ", ".join(f"{package} {version}" for package, version in self.versions)
        return f"{self.device_kind} ({'; '.join(filter(None, (axes, self.network, versions)))})"


@dataclass(frozen=True)
class LinearFit:
    """Seconds as a line over bytes, fitted to measured points.

    Attributes:
      latency_s: of a message of no bytes.
      inverse_bandwidth_s_per_byte: what each byte adds; 0 where latency is all that could be seen.
      relative_residual: root mean square of (measured - fitted) / measured.
      points: what was measured: pairs (bytes, seconds).
    """

    latency_s: float
    inverse_bandwidth_s_per_byte: float
    relative_residual: float
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if min(self.latency_s, self.inverse_bandwidth_s_per_byte, self.relative_residual) < 0:
            raise ValueError("a fit with a negative latency, bandwidth or residual")

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.inverse_bandwidth_s_per_byte

    def __str__(self) -> str:
        rate = self.inverse_bandwidth_s_per_byte
        return f"{self.latency_s:.3g} s" + (f" and a second for each {1e-9 / rate:.4g} GB" if rate else "")


@dataclass(frozen=True)
class OpTime:
    """Device time of one HLO op.

    Attributes:
      name: of the instruction in the compiled module, such as ``fusion.3``.
      per_device_s: seconds of one execution, on each device of this process in order of its ordinal: the median over
        runs. A collective's includes waiting for the other devices. Empty if not measured.
      executions: in one run of the step; more than one inside a loop.
      equations: positions in ``ir.traversal.equations(program.jaxpr)`` of the equations it may stem from.
      where: the user's line, ``file:line (function)``; empty if it stems from none.
      source: how it was obtained.
    """

    name: str
    per_device_s: tuple[float, ...]
    executions: int
    equations: tuple[int, ...]
    where: str
    source: Source

    def __post_init__(self) -> None:
        if min(self.per_device_s, default=0.0) < 0:
            raise ValueError(f"{self.name} took less than no time")

    @property
    def key(self) -> str:
        return self.name

    @property
    def seconds(self) -> float | None:
        """Of one execution: the median over devices."""
        return statistics.median(self.per_device_s) if self.per_device_s else None

    def said(self) -> str:
        return str(self.source) if self.seconds is None else f"{self.seconds:.4g} s"


class CollectiveKind(StrEnum):
    """The collectives that are timed, as HLO calls them.

    Their sizes are bytes of the whole result of an all-gather, of the whole operand of a reduce-scatter, and else of
    one device's operand.
    """

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"


@dataclass(frozen=True)
class CollectiveFit:
    """Seconds of one kind of collective over mesh axes, by bytes as ``CollectiveKind`` counts them."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    fit: LinearFit | None
    source: Source

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return self.kind, self.axes

    def said(self) -> str:
        return str(self.fit or self.source)


class Direction(StrEnum):
    """Between a device's memory and pinned memory of its host."""

    TO_HOST = "to host"
    FROM_HOST = "from host"


@dataclass(frozen=True)
class CopyFit:
    """Seconds of a copy in one direction, all devices copying at once, by bytes on each device.

    Attributes:
      both_ways: how many times longer it takes while all devices copy the other way, too; None if not measured.
    """

    direction: Direction
    fit: LinearFit | None
    source: Source
    both_ways: float | None = None

    @property
    def key(self) -> str:
        return self.direction

    def said(self) -> str:
        beside = "" if self.both_ways is None else f", {self.both_ways:.2f} times longer beside copies the other way"
        return f"{self.fit or self.source}{beside}"


@dataclass(frozen=True)
class StepTime:
    """Seconds of whole runs of the step, from the call until its results are there."""

    seconds: float
    source: Source


@dataclass(frozen=True)
class MemoryFigures:
    """Memory of one device, in bytes.

    Attributes:
      argument_bytes, output_bytes, temp_bytes: XLA's buffer assignment, device memory only.
      alias_bytes: of outputs that take the memory of arguments.
      host_argument_bytes, host_output_bytes, host_temp_bytes: the same in the host's memory.
      live_bytes: the live-bytes curve: while each instruction of the schedule runs.
      source: how these were obtained.
      allocator_peak_bytes: the allocator's high-water mark on the fullest device; None where the backend keeps none.
      allocator_source: how that was obtained.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_temp_bytes: int
    live_bytes: tuple[int, ...] = field(repr=False)
    source: Source
    allocator_peak_bytes: int | None
    allocator_source: Source

    @property
    def device_bytes(self) -> int:
        """What the step takes of a device while it runs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes
