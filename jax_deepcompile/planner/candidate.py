"""One plan evaluated: the program rewritten, compiled and simulated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.simulator import Simulation, simulate
from jax_deepcompile.hlo.reader import Module, read
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import alone_options, compile_options, host_bytes, kernel_options, peak_bytes
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.runtime.memory import trim_heap
from jax_deepcompile.runtime.parallel import interruptible
from jax_deepcompile.summary import Summarized, Summary
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule


@dataclass(frozen=True)
class Environment:
    """What a program is planned for.

    Attributes:
      mesh: the devices.
      platform: ``cuda`` or ``cpu``.
      costs: what things take on it.
      limit_bytes: device memory a step may take; None for no limit.
      host_bytes: of the host's memory, what a step may take for each device; 0 for none.
      kernels: a file for kernels that one candidate compiled and the next one needs too; None to compile them again.
      disabled: kinds of decisions that are left out of every plan.
    """

    mesh: AnyMesh
    platform: str
    costs: CostModel
    limit_bytes: int | None
    host_bytes: int = 0
    kernels: Path | None = None
    disabled: frozenset[str] = frozenset()

    def replace(self, **changes: Any) -> Environment:
        return dataclasses.replace(self, **changes)

    def expected_s(self, candidate: Candidate) -> float:
        """The step a plan will take once it is scheduled: XLA:GPU gets latencies last, when all else is decided.

        Only pipelined loops have work beside every collective of theirs.
        """
        schedules = self.platform == "cuda" and candidate.plan.of(LoopSchedule)
        return candidate.simulation.attainable_s if schedules else candidate.prediction.step_s

    def fits(self, candidate: Candidate) -> bool:
        """Whether its program keeps the limits of the device's memory and of the host's."""
        if candidate.prediction.host_bytes > self.host_bytes:
            return False
        return self.limit_bytes is None or candidate.prediction.peak_bytes <= self.limit_bytes


@dataclass(frozen=True)
class Evaluation:
    """What the compiler and the simulator made of a plan.

    Attributes:
      argument_bytes: state and batch, of ``prediction.peak_bytes``.
    """

    lowered: jax.stages.Lowered
    module: Module
    simulation: Simulation
    prediction: Prediction
    argument_bytes: int


@dataclass(frozen=True, repr=False)
class Candidate(Summarized):
    """A plan carried out.

    Attributes:
      plan: the decisions.
      program: the base program rewritten by them.
      evaluation: None as long as it is not compiled.
      rivals: of what a search found best, the other plans that simulate fastest, with their predictions.
      way: of what a search found best: the step before any change, and after each that was accepted, by what proposed
        it.
    """

    plan: Plan
    program: Program
    evaluation: Evaluation | None = None
    rivals: tuple[Plan, ...] = ()
    way: tuple[tuple[str, Simulation], ...] = ()

    def _summary(self) -> Summary:
        expected = (("expected step", "not compiled"),) if self.evaluation is None else self.prediction.rows()
        mesh = ("mesh", self.program.mesh_text)
        return Summary(
            f"Candidate {self.program.name}", (mesh, *self.plan.rows(), *expected), self.plan._summary().trees
        )

    @property
    def evaluated(self) -> Evaluation:
        assert self.evaluation is not None, "an opening strategy looks at the program alone"
        return self.evaluation

    @property
    def simulation(self) -> Simulation:
        return self.evaluated.simulation

    @property
    def prediction(self) -> Prediction:
        return self.evaluated.prediction

    @property
    def waits(self) -> bool:
        """Whether enough communication and copies are exposed for another compilation."""
        exposed_s = self.prediction.exposed_s + self.prediction.exposed_copy_s
        return exposed_s >= WORTH_TRYING * self.prediction.step_s

    @property
    def is_delayed(self) -> bool:
        """Whether enough waits, or is slowed by what runs beside it, for the step to be well above its bound."""
        return self.prediction.step_s - self.prediction.bound_s >= WORTH_TRYING * self.prediction.step_s

    @property
    def delay(self) -> float:
        """What kernels lose in each second of collectives or copies, which run beside them."""
        totals = self.simulation.totals
        return totals.slowed_s / max(totals.communication_s + totals.copy_s, 1e-12)

    def simulated_by(self, costs: CostModel) -> Candidate:
        """The same by other costs."""
        simulation = simulate(self.evaluated.module, costs)
        prediction = prediction_of(simulation, self.prediction.peak_bytes, self.prediction.host_bytes)
        evaluation = dataclasses.replace(self.evaluated, simulation=simulation, prediction=prediction)
        return dataclasses.replace(self, evaluation=evaluation)


WORTH_TRYING = 0.01
"""The share of a step that there must be to gain before a compilation, or all memory that is left, is spent on it."""

WORTH_SPARING = WORTH_TRYING / 2
"""Likewise of what is counted as kernels' gain where less runs beside them: of Llama-2-7B they gained twice that."""


def evaluate(base: Program, plan: Plan, environment: Environment) -> Candidate:
    """Rewrites, compiles and simulates."""
    program = plan.program(base, environment.mesh)
    return compiled(program, lower(program, environment.mesh, environment.platform), plan, environment)


def compiled(program: Program, lowered: jax.stages.Lowered, plan: Plan, environment: Environment) -> Candidate:
    """What XLA makes of ``lowered``, the ``program`` that ``plan`` made, by the options of the plan."""
    platform = environment.platform
    options: dict[str, Any] = {
        **compile_options(platform),
        **alone_options(platform),
        **kernel_options(platform, environment.kernels),
        **plan.compiler_options(),
    }
    compiled = interruptible(lambda: lowered.compile(compiler_options=options or None))
    memory: Any = compiled.memory_analysis()
    module = read(compiled.as_text() or "")
    del compiled
    trim_heap()
    simulation = simulate(module, environment.costs)
    prediction = prediction_of(simulation, peak_bytes(memory), host_bytes(memory))
    evaluation = Evaluation(lowered, module, simulation, prediction, memory.argument_size_in_bytes)
    return Candidate(plan, program, evaluation)


def prediction_of(simulation: Simulation, peak: int, on_host: int = 0) -> Prediction:
    """The figures of ``simulation`` that a plan has, of a program that takes ``peak`` bytes, and ``on_host`` others."""
    return Prediction(
        step_s=simulation.step_s,
        compute_s=simulation.compute_s,
        communication_s=simulation.communication_s,
        exposed_s=simulation.exposed_communication_s,
        peak_bytes=peak,
        bound_s=simulation.bound_s,
        launches=tuple(sorted(simulation.launches.items())),
        rematerialized_s=simulation.rematerialized_s,
        copy_s=simulation.copy_s,
        exposed_copy_s=simulation.exposed_copy_s,
        host_bytes=on_host,
    )
