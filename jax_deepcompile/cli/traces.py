"""Steps simulated as they are compiled, and the files of ``--trace``."""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.report.chrome_trace import required
from jax_deepcompile.report.simulated import SimulatedStep, Timelines, simulate
from jax_deepcompile.stages import TracedStep


def checked(file: Path | None) -> Path | None:
    """Raises ArgumentError if ``file`` cannot be written, before what takes its time."""
    return file and required(file)


def simulated(traced: TracedStep) -> SimulatedStep:
    """The step as compiled.

    Raises:
      ArgumentError: its mesh is abstract.
      MemoryExceededError: it does not fit.
    """
    if not isinstance(traced.mesh, Mesh):
        raise errors.ArgumentError("simulate", "mesh", traced.mesh, "devices: an abstract mesh has none to simulate")
    return simulate(traced.lower().compile(), traced.mesh)


def write_trace(file: Path | None, traced: TracedStep, measured: Timelines | None = None) -> list[str]:
    """Writes the step as compiled and simulated, beside what was measured if anything was; tells what was written."""
    if file is None:
        return []
    first, *others = simulated(traced).write_trace(file, measured)
    more = f" and {len(others)} more, one a device" if others else ""
    return [f"trace of the {'measured and the ' * bool(measured)}simulated step: {first}{more}"]
