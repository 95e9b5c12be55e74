"""The files of ``--trace``."""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.report.chrome_trace import required
from jax_deepcompile.report.simulated import Timelines, simulate
from jax_deepcompile.stages import TracedStep


def checked(file: Path | None) -> Path | None:
    """Raises ArgumentError if ``file`` cannot be written, before what takes its time."""
    return file and required(file)


def write_trace(file: Path | None, traced: TracedStep, measured: Timelines | None = None) -> list[str]:
    """Writes the step as compiled and simulated, beside what was measured if anything was; tells what was written."""
    if file is None:
        return []
    if not isinstance(traced.mesh, Mesh):
        raise errors.ArgumentError("write_trace", "mesh", traced.mesh, "devices: an abstract mesh has none to simulate")
    first, *others = simulate(traced.lower().compile(), traced.mesh).write_trace(file, measured)
    more = f" and {len(others)} more, one a device" if others else ""
    return [f"trace of the {'measured and the ' * bool(measured)}simulated step: {first}{more}"]
