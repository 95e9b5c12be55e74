"""Simulates published runs and holds each against what was measured."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.validation.runs import RUNS, PublishedRun
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.overlap import GPU
from jax_deepcompile.costs.rates import published_rates
from jax_deepcompile.costs.simulator import simulate
from jax_deepcompile.hlo.reader import Module, read

GIB = 1 << 30

SUSTAINED = (0.6, 0.66, 0.73, 0.8, 0.87)
"""Values of the one fitted constant that every run is simulated with; between them, steps are interpolated."""


@dataclass(frozen=True)
class Simulated:
    """One published run in the simulator.

    Attributes:
      number: of the run.
      step_s: seconds a step by the package's constants.
      compute_s, communication_s, exposed_s: parts of them.
      peak_bytes: of a GPU, by XLA.
      steps_s: seconds a step by each of ``SUSTAINED``.
    """

    number: int
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    peak_bytes: int
    steps_s: tuple[float, ...]

    @property
    def run(self) -> PublishedRun:
        return next(run for run in RUNS if run.number == self.number)

    @property
    def error(self) -> float:
        """Simulated over measured, less one."""
        return self.step_s / self.run.measured_s - 1

    def step_at(self, sustained: float) -> float:
        """Seconds a step with another value of the fitted constant: nearly straight in its inverse."""
        inverse = [1 / value for value in reversed(SUSTAINED)]
        return float(np.interp(1 / sustained, inverse, list(reversed(self.steps_s))))

    def error_at(self, sustained: float) -> float:
        return self.step_at(sustained) / self.run.measured_s - 1


def costs_of(run: PublishedRun, sustained: float = GPU.sustained) -> CostModel:
    """What things take on a run's cluster, with the attention that it used."""
    target = run.cluster.target()
    network = dataclasses.replace(target.network, nic_fraction=run.nic_fraction)
    rates = published_rates(target.hardware.name, run.attention)
    return CostModel(target.hardware, network, rates, dataclasses.replace(GPU, sustained=sustained))


def simulated(run: PublishedRun, executable: Any) -> Simulated:
    """A run whose step was compiled to ``executable``."""
    module, memory = read(executable.as_text()), executable.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes
    return of_module(run, module, peak)


def of_module(run: PublishedRun, module: Module, peak_bytes: int) -> Simulated:
    played = simulate(module, costs_of(run))
    return Simulated(
        run.number,
        played.step_s,
        played.compute_s,
        played.communication_s,
        played.exposed_communication_s,
        peak_bytes,
        tuple(simulate(module, costs_of(run, value)).step_s for value in SUSTAINED),
    )


def fitted(runs: Sequence[Simulated]) -> float:
    """The value of the fitted constant with the least mean error, in logarithms, over those that were compiled.

    The package's own where there is none.
    """
    compiled = [run for run in runs if run.run.is_compiled]
    if not compiled:
        return GPU.sustained

    def mean_error(sustained: float) -> float:
        return statistics.mean(abs(math.log1p(run.error_at(sustained))) for run in compiled)

    return min(np.arange(SUSTAINED[0], SUSTAINED[-1], 0.005).round(3).tolist(), key=mean_error)


def left_out_errors(runs: Sequence[Simulated]) -> Mapping[int, float]:
    """Of each run, by number: its error with the constant fitted to all others."""
    return {run.number: run.error_at(fitted([other for other in runs if other is not run])) for run in runs}


def median_error(errors: Iterable[float]) -> float:
    return statistics.median(map(abs, errors))


def to_json(runs: Sequence[Simulated], date: str, jax_version: str) -> str:
    return json.dumps({"date": date, "jax": jax_version, "runs": [dataclasses.asdict(run) for run in runs]}, indent=1)


def from_json(text: str) -> list[Simulated]:
    return [Simulated(**found | {"steps_s": tuple(found["steps_s"])}) for found in json.loads(text)["runs"]]
