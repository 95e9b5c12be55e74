"""Any step simulated, and ways to look at what came of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.simulate import HasProgram, HasText
from jax_deepcompile.costs.simulate import simulate as simulation_of
from jax_deepcompile.costs.simulation import Event, Simulation
from jax_deepcompile.report import chrome_trace, plots, timeline
from jax_deepcompile.report.origins import Origins
from jax_deepcompile.summary import Summary

Timelines: TypeAlias = Mapping[int, Sequence[Event]]
"""What devices ran when, by their numbers in the mesh."""


@dataclass(frozen=True, repr=False)
class SimulatedStep(Simulation):
    """What ``simulate`` found: a ``Simulation`` that can be drawn, and written as a trace.

    Attributes:
      devices: how many run the step.
    """

    devices: int = 1

    def write_trace(self, file: str | os.PathLike, measured: Timelines | None = None) -> tuple[Path, ...]:
        """Writes the step for Perfetto or Holistic Trace Analysis to open, each operation as often as it runs.

        Args:
          file: ending in ``.json`` or ``.json.gz``; of rank 0, those of others are called so too: ``x.rank1.json``.
          measured: what devices ran when, by rank, such as ``step.profile(...).timelines``. Each of them has a file,
            with the simulated step beside it on the same clock. By default the simulated step alone is written, as rank
            0's, as all do the same.

        Returns:
          The files.

        Raises:
          ArgumentError: ``file`` ends otherwise, or its folder is not there.
        """
        path, simulated = chrome_trace.required(file), list(self.unrolled())
        told: dict[str, Any] = {"world_size": self.devices, "origins": Origins.of(self.module)}
        if not measured:
            trace = chrome_trace.chrome_trace("simulated", simulated, live_bytes=timeline.live_bytes(self), **told)
            return (chrome_trace.write(path, trace),)
        paths = []
        for rank, events in measured.items():
            trace = chrome_trace.chrome_trace("measured", events, rank=rank, beside={"simulated": simulated}, **told)
            paths.append(chrome_trace.write(chrome_trace.path_of_rank(path, rank), trace))
        return tuple(paths)

    def plot_timeline(self, start_s: float = 0.0, end_s: float | None = None, ax: Any = None) -> Any:
        """Draws what runs when, a row for each stream, with what compute waits for.

        Args:
          start_s, end_s: the part of the step to draw; by default all of it.
          ax: matplotlib's axes to draw on; by default new ones.

        Returns:
          The axes.

        Raises:
          MissingExtraError: matplotlib is not installed.
          ArgumentError: the part is empty.
        """
        last_s = self.step_s if end_s is None else end_s
        if not 0 <= start_s < last_s:
            expected = f"seconds, from 0 and before the end, {last_s:.4g}"
            raise errors.ArgumentError("plot_timeline", "start_s", start_s, expected)
        return plots.timeline_plot(self, start_s, last_s, ax)

    def plot_memory(self, limit: int | None = None, ax: Any = None) -> Any:
        """Draws the bytes of device memory that are needed over the step.

        Args:
          limit: bytes to draw a line at.
          ax: matplotlib's axes to draw on; by default new ones.

        Returns:
          The axes.

        Raises:
          MissingExtraError: matplotlib is not installed.
        """
        return plots.memory_plot(self, limit, ax)

    def _summary(self) -> Summary:
        shown = super()._summary()
        return Summary(shown.title, (*shown.rows, ("to see", ".plot_timeline(), .plot_memory(), .write_trace(file)")))


def simulate(step: HasText | HasProgram, mesh: Mesh, profile: Profile | None = None) -> SimulatedStep:
    """Simulates one execution of a step: of a compiled one from its scheduled HLO, of a traced one from its program.

    A compiled step is played in the order that XLA chose. A traced one is planned, and its program played with
    collectives begun as early as their operands and the network allow, whatever memory that takes, and kernels that XLA
    has yet to fuse: it ranks programs before they are compiled, and its seconds are not those of the compiled step. The
    result's ``is_scheduled`` says which it is, and so does its text.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    >>> compiled = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((512, 512), jnp.float32)).compile()
    >>> simulation = simulate(compiled, mesh)
    >>> simulation.is_scheduled, simulation.step_s > 0, simulation.communication_s
    (True, True, 0.0)

    Args:
      step: compiled by ``jax.jit`` or by this package, or traced by ``ShardedStep.trace``; for the devices of
        ``mesh``, which need not be attached.
      mesh: tells the kind of the devices and which of them share a node.
      profile: measured times, which go before those of the tables: of collectives and copies, and, if it was taken of
        this step, of its kernels.

    Returns:
      Seconds a step, of compute, of communication and of it exposed, with the timeline; see ``Simulation``. It has
      ``plot_timeline``, ``plot_memory`` and ``write_trace``.

    Raises:
      ArgumentError: ``step`` or ``mesh`` is something else.
      MalformedHloError: the text is no scheduled HLO module.
      ProfileMismatchError: the profile is of other devices.
    """
    found = simulation_of(step, mesh, profile)
    figures = {field.name: getattr(found, field.name) for field in fields(Simulation)}
    return SimulatedStep(**figures, devices=mesh.size)
