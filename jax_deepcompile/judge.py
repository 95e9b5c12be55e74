"""Any compiled function judged by the same rule: what its schedule would take on the hardware it was compiled for."""

from __future__ import annotations

from typing import Protocol

from jax.sharding import Mesh

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.devices import hardware_of, network_of
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.simulator import simulate as simulate_module
from jax_deepcompile.lowering.hlo import read


class HasText(Protocol):
    """What XLA compiled: a ``jax.stages.Compiled``, or a ``CompiledStep``."""

    def as_text(self) -> str | None: ...


def simulate(compiled: HasText, mesh: Mesh) -> Simulation:
    """Simulates one execution of a compiled function from its scheduled HLO.

    Args:
      compiled: by ``jax.jit`` or by this package, for the devices of ``mesh``; they need not be attached.
      mesh: tells the kind of the devices and which of them share a node.

    Returns:
      Seconds a step, of compute, of communication and of it exposed, with the timeline; see ``Simulation``.

    Raises:
      MalformedHloError: the text is no scheduled HLO module.
    """
    costs = CostModel(hardware_of(mesh.devices.flat[0].device_kind), network_of(mesh.devices.flat))
    return simulate_module(read(compiled.as_text() or ""), costs)
