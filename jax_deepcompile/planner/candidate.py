"""One plan carried out: the program rewritten, compiled and simulated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulator import Simulation, simulate
from jax_deepcompile.hlo.reader import Module, read
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import alone_options, compile_options, kernel_options, peak_bytes
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.planner.apply import apply_plan
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.runtime.parallel import interruptible


@dataclass(frozen=True)
class Environment:
    """What a program is planned for.

    Attributes:
      mesh: the devices.
      platform: ``cuda`` or ``cpu``.
      costs: what things take on it.
      limit_bytes: device memory a step may take; None for no limit.
      kernels: a file for kernels that one trial compiled and the next one needs too; None to compile them again.
    """

    mesh: AnyMesh
    platform: str
    costs: CostModel
    limit_bytes: int | None
    kernels: Path | None = None

    def expected_s(self, trial: Trial) -> float:
        """The step a plan will take once it is scheduled: XLA:GPU is told latencies last, when all else is decided.

        Only pipelined loops have work beside every collective of theirs.
        """
        schedules = self.platform == "cuda" and trial.plan.loops
        return trial.simulation.attainable_s if schedules else trial.prediction.step_s


@dataclass(frozen=True)
class Trial:
    """A plan carried out and compiled.

    Attributes:
      plan: the decisions.
      program: the base program rewritten by them.
      lowered: the same, for the compiler.
      module: what the compiler made of it.
      simulation: of the module.
      prediction: its figures.
      argument_bytes: state and batch, of ``prediction.peak_bytes``.
    """

    plan: Plan
    program: Program
    lowered: jax.stages.Lowered
    module: Module
    simulation: Simulation
    prediction: Prediction
    argument_bytes: int

    @property
    def waits(self) -> bool:
        """Whether enough communication is exposed for another compilation."""
        return self.prediction.exposed_s >= WORTH_TRYING * self.prediction.step_s


WORTH_TRYING = 0.01
"""The share of a step that there must be to gain before a compilation, or all memory that is left, is spent on it."""


def attempt(base: Program, plan: Plan, environment: Environment) -> Trial:
    """Rewrites, compiles and simulates."""
    program = apply_plan(base, environment.mesh, plan)
    lowered = lower(program, environment.mesh, environment.platform)
    return compiled(program, lowered, plan, environment)


def compiled(program: Program, lowered: jax.stages.Lowered, plan: Plan, environment: Environment) -> Trial:
    """What XLA makes of ``lowered``, the ``program`` that ``plan`` made, as the plan tells it to."""
    platform = environment.platform
    options: dict[str, Any] = {
        **compile_options(platform),
        **alone_options(platform),
        **kernel_options(platform, environment.kernels),
        **plan.compiler_options(),
    }
    compiled = interruptible(lambda: lowered.compile(compiler_options=options or None))
    memory: Any = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    module = read(compiled.as_text() or "")
    simulation = simulate(module, environment.costs)
    return Trial(plan, program, lowered, module, simulation, prediction_of(simulation, peak_bytes(memory)), arguments)


def prediction_of(simulation: Simulation, peak: int) -> Prediction:
    """The figures of ``simulation`` that a plan has, of a program that takes ``peak`` bytes."""
    return Prediction(
        simulation.step_s,
        simulation.compute_s,
        simulation.communication_s,
        simulation.exposed_communication_s,
        peak,
        simulation.bound_s,
        tuple(sorted(simulation.launches.items())),
    )


def fits(trial: Trial, environment: Environment) -> bool:
    """Whether the program keeps the memory limit."""
    return environment.limit_bytes is None or trial.prediction.peak_bytes <= environment.limit_bytes
