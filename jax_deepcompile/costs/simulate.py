"""Any step, compiled or traced, simulated alike: what it would take on the hardware it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.costs.combining import Thresholds
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.measured import costs_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.program_simulation import simulate_program
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.simulator import simulate as simulate_module
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.ir.program import Program


@runtime_checkable
class HasText(Protocol):
    """What XLA compiled: a ``jax.stages.Compiled``, or a ``CompiledStep``."""

    def as_text(self) -> str | None: ...


class HasOptions(Protocol):
    """What XLA is compiled with: a ``Plan``."""

    def compiler_options(self) -> Mapping[str, bool | int | str | bytes]: ...


class HasProgram(Protocol):
    """What is still to be compiled: a ``TracedStep``."""

    @property
    def planned(self) -> Program: ...

    def plan(self) -> HasOptions: ...


def simulate(step: HasText | HasProgram, mesh: Mesh, profile: Profile | None = None) -> Simulation:
    """Simulates one execution of a step; see ``report.simulated.simulate``, which is what users call.

    Raises:
      ArgumentError: ``step`` or ``mesh`` is something else.
      MalformedHloError: the text is no scheduled HLO module.
      ProfileMismatchError: the profile is of other devices.
    """
    if not isinstance(mesh, Mesh):
        raise errors.ArgumentError(
            "simulate", "mesh", mesh, "the jax.sharding.Mesh of the devices that the step is for"
        )
    play, costs = _player(step), costs_of(mesh, profile)
    played = play(costs)
    calibrated = costs.calibrated(played)
    return played if calibrated is costs else play(calibrated)


def _player(step: HasText | HasProgram) -> Callable[[CostModel], Simulation]:
    if isinstance(step, HasText):
        return partial(simulate_module, read(step.as_text() or ""))
    if not hasattr(type(step), "planned"):
        expected = "a traced or a compiled step: step.trace(...) or step.lower(...).compile()"
        raise errors.ArgumentError("simulate", "step", step, expected)
    thresholds = Thresholds.of_options(step.plan().compiler_options())
    return partial(simulate_program, step.planned, thresholds=thresholds)
