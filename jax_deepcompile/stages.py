"""The ahead-of-time stages of a sharded step, named as JAX names its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.compiler import Compilation, Runs, plan
from jax_deepcompile.costs.simulate import simulate
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.utilisation import Utilisation, utilisation_of
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import compile_options
from jax_deepcompile.partition.partition import Partitioned
from jax_deepcompile.planner.limits import MemoryLimit, limit_bytes, refuse_unknown, require_fit
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.session import Planned
from jax_deepcompile.report import plots
from jax_deepcompile.report.division import Division, division_of
from jax_deepcompile.report.explanation import Explanation, explain
from jax_deepcompile.report.headline import device_word
from jax_deepcompile.report.memory_curve import LimitedStep, monotone
from jax_deepcompile.report.page.page import AFTER, Page, page_of, ways
from jax_deepcompile.report.page.runs import Run
from jax_deepcompile.report.summary import summary_of_stage, summary_of_trace
from jax_deepcompile.summary import Summarized, Summary


@dataclass(frozen=True, repr=False)
class TracedStep(Summarized):
    """A step traced and partitioned for the shapes it was given."""

    compilation: Compilation
    _shapes: tuple

    def _summary(self) -> Summary:
        made = self.compilation
        return summary_of_trace(made.traced.program, made.sharded, made.planned_already)

    @property
    def mesh(self) -> AnyMesh:
        """What it is for."""
        return self.compilation.context.use.mesh

    @property
    def program(self) -> Program:
        """The global view, as the user wrote it."""
        return self.compilation.program

    @property
    def partitioned(self) -> Partitioned:
        """What was decided for every equation and every leaf of the state."""
        return self.compilation.partitioned

    @property
    def sharded(self) -> Program:
        """The local view, as each device runs it."""
        return self.compilation.sharded

    @property
    def planned(self) -> Program:
        """The local view, rewritten by the plan."""
        return self.compilation.planned.program

    @property
    def utilisation(self) -> Utilisation | None:
        """Model FLOPs and examples of a step on one device; None without devices or matrix products."""
        return utilisation_of(self.program, self.compilation.context.use.mesh)

    def plan(self) -> Plan:
        """The decisions of every pass."""
        return self.compilation.planned.plan

    def explain(self, assume: bool = False) -> Explanation:
        """What was decided and why: fields, which print as text that begins with what one quotes.

        Args:
          assume: whether a step on CPU devices, of which nothing is measured, is simulated by assumed figures; it is
            compiled for that.
        """
        self.plan()
        return explain_compilation(self.compilation, assume)

    def division(self) -> Division:
        """What every argument is, how state is divided and what is sent, before planning."""
        made = self.compilation
        return division_of(made.program, made.partitioned, made.sharded, made.traced.reasons)

    def page(self, beside: Mapping[str, Simulation | TracedStep] | None = None) -> Page:
        """What runs when, where memory goes and what was decided, as one HTML file: ``page().write("step.html")``.

        It shows the step before any change, after each that was accepted, and as planned; of a plan that was not made
        in this process after each kind of decision, which are compiled for it.

        Args:
          beside: what to compare it with, by what to call it: this step as it runs elsewhere, such as ``{"jit":
            deepcompile.simulate(...)}``, or others, traced.

        Raises:
          ArgumentError: the mesh is abstract: there are no devices to simulate a step on.
          MemoryExceededError: it does not fit.
        """
        kind = self._devices().devices.flat[0].device_kind
        self.compilation.examine(in_steps=True, assume=True)
        planned = self.compilation.planned
        shown = ways(planned) or {AFTER: self._simulation()}
        runs = {**(beside or {}), **shown, AFTER: shown[AFTER]}
        drawn = {
            name: run._run(run._simulation()) if isinstance(run, TracedStep) else self._run(run)
            for name, run in runs.items()
        }
        return page_of(planned, self.sharded, drawn, kind, device_word(self.mesh))

    def _run(self, simulation: Simulation) -> Run:
        return Run.of(simulation, self.program, self.compilation.planned.program, self.utilisation)

    def _simulation(self) -> Simulation:
        return simulate(self.lower().compile(), self._devices(), self.compilation.planned.profile)

    def _devices(self) -> Mesh:
        if not isinstance(self.mesh, Mesh):
            expected = "a jax.sharding.Mesh of the devices that the step is for"
            raise errors.ArgumentError("page", "mesh", self.mesh, expected)
        return self.mesh

    def dump(self, folder: str | os.PathLike) -> None:
        """Writes the program before and after every stage and every kind of decision into ``folder``, to read.

        An operation is a line, with type, bytes and simulated seconds; ``summary.txt`` counts what each stage changed.
        """
        self.compilation.dump(Path(folder))

    def memory_curve(self, limits: Sequence[MemoryLimit | LimitedStep]) -> tuple[LimitedStep, ...]:
        """What a step takes, simulated, under memory limits, the largest first: no longer than under a smaller one.

        Plans once for each, but for the step's own, those that the plan of a larger one keeps, and those below one that
        nothing fits.

        Args:
          limits: as ``shard(memory_limit=...)`` takes them; or what is known already, as this returns it.

        Raises:
          MemoryLimitError: one of ``limits`` is not understood.
          ArgumentError: one is no limit.
        """
        points = [limit for limit in limits if isinstance(limit, LimitedStep)]
        others = [limit for limit in limits if not isinstance(limit, LimitedStep)]
        for limit in others:
            refuse_unknown(limit)
        for size, limit in sorted(((_bytes(limit), limit) for limit in others), key=lambda each: -each[0]):
            same = (each.under(size) for each in points)
            points.append(next(filter(None, same), None) or limited(self.compilation, limit))
        return monotone(points)

    def plot_memory_curve(self, limits: Sequence[MemoryLimit | LimitedStep], ax: Any = None) -> Any:
        """Draws ``memory_curve``: seconds a step, simulated, over memory limits.

        Args:
          limits: as ``memory_curve`` takes them.
          ax: matplotlib's axes to draw on; by default new ones.

        Returns:
          The axes.

        Raises:
          MissingExtraError: matplotlib is not installed.
        """
        return plots.memory_curve_plot(self.memory_curve(limits), ax)

    def lower(self) -> LoweredStep:
        """Plans, and lowers to StableHLO for the platform of the mesh."""
        made, platform = self.compilation, self.compilation.context.use.platform
        shapes = made.placed_shapes(self._shapes)
        lowered = made.jitted.trace(*shapes).lower(lowering_platforms=(platform,))
        return LoweredStep(lowered, platform, made.planned, made.runs)


def _bytes(limit: MemoryLimit) -> int:
    """``limit`` in bytes; of a share of the device's memory, of which nobody has asked yet, more than any is."""
    try:
        return limit_bytes(limit, None) or _MOST_BYTES
    except errors.MemoryLimitError:
        return _MOST_BYTES


_MOST_BYTES = 1 << 62


def limited(made: Compilation, limit: MemoryLimit, **more: Any) -> LimitedStep:
    """``made`` planned under ``limit``; ``more`` are other options of ``shard``.

    Raises:
      ArgumentError: no limit holds for its devices, and so nothing is simulated.
    """
    options = replace(made.context.options, memory_limit=limit, plan=None, measure=False, **more)
    try:
        as_it_is = options == made.context.options
        planned = made.planned if as_it_is else plan(made.sharded, replace(made.context, options=options))
    except errors.MemoryExceededError as error:
        return LimitedStep(error.limit_bytes, None, error.needed_bytes)
    expected = planned.plan.prediction
    if expected is None or planned.limit_bytes is None:
        raise errors.ArgumentError("memory_curve", "limits", limit, "a limit: these devices have none of their own")
    return LimitedStep(planned.limit_bytes, expected, expected.peak_bytes)


def explain_compilation(made: Compilation, assume: bool = False) -> Explanation:
    """What was decided and why, so far; see ``TracedStep.explain``."""
    if made.planned_already is not None:
        made.examine(assume=assume)
    planned, launches, mesh = made.planned_already, made.runs.launches, made.context.use.mesh
    achieves = utilisation_of(made.program, mesh)
    return explain(made.program, made.partitioned, made.sharded, made.traced.reasons, mesh, planned, launches, achieves)


@dataclass(frozen=True, repr=False)
class LoweredStep(Summarized):
    """A step in StableHLO."""

    _lowered: jax.stages.Lowered
    _platform: str
    _planned: Planned
    _runs: Runs

    def _summary(self) -> Summary:
        return summary_of_stage("LoweredStep", self._planned)

    def as_text(self, dialect: str | None = None) -> str:
        """The module's text; ``dialect`` as for ``jax.stages.Lowered.as_text``."""
        return self._lowered.as_text(dialect)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledStep:
        """Compiles with XLA.

        Args:
          compiler_options: XLA options by name, on top of those this package sets for the platform.

        Raises:
          MemoryExceededError: it takes more than the memory limit, which the plan said it would not.
        """
        planned = self._planned.plan.compiler_options()
        options: dict[str, Any] = compile_options(self._platform) | planned | (compiler_options or {})
        compiled = self._lowered.compile(compiler_options=options or None)
        require_fit(self._planned.program.name, compiled, self._planned.limit_bytes)
        if not compiler_options:
            self._runs.compiled = compiled
        return CompiledStep(compiled, self._planned)


@dataclass(frozen=True, repr=False)
class CompiledStep(Summarized):
    """A step compiled by XLA."""

    _compiled: jax.stages.Compiled
    _planned: Planned

    def _summary(self) -> Summary:
        return summary_of_stage("CompiledStep", self._planned)

    def as_text(self) -> str:
        """The optimised, scheduled HLO module."""
        return self._compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """XLA's buffer assignment for one device, in bytes: arguments, outputs, temporaries, aliases."""
        return self._compiled.memory_analysis()
