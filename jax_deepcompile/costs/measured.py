"""Costs by what was measured, and by the tables where nothing was."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jax.sharding import Mesh

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.devices import hardware_of, machine_of, network_of
from jax_deepcompile.costs.entries import CollectiveFit, Direction
from jax_deepcompile.costs.overlap import overlap_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.costs.rates import published_rates
from jax_deepcompile.costs.simulation import Simulation
from jax_deepcompile.costs.streams import Stream, Timing


@dataclass(frozen=True)
class MeasuredCostModel(CostModel):
    """A cost model whose collectives, copies and kernels are those of a profile, where it has them.

    Attributes:
      profile: measured on the mesh that is planned for. A group of devices is known by its size: two sets of axes of
        the same size but different links are told apart by the first of the profile only.
      slowdowns: measured over tabled seconds of the kernels that stem from one line of the user's, by ``file:line``.
      slowdown: the same of all kernels together, for lines that were not measured.
    """

    profile: Profile = field(kw_only=True)
    slowdowns: Mapping[str, float] = field(kw_only=True, default_factory=dict, hash=False)
    slowdown: float = field(kw_only=True, default=1.0)

    def calibrated(self, simulation: Simulation) -> MeasuredCostModel:
        """This model with the profile's kernels, found again by name in a simulation of the program it was taken of.

        Args:
          simulation: by this model; if it has fewer than half of its kernels' seconds in common with the profile, it
            is of another program, and the model stays as it is.
        """
        tabled_s: dict[str, float] = defaultdict(float)
        measured_s: dict[str, float] = defaultdict(float)
        for event in simulation.timeline:
            seconds = self.profile.op_s(event.name) if event.stream is Stream.COMPUTE else None
            if seconds is not None:
                tabled_s[event.source] += event.trips * (event.end_s - event.start_s)
                measured_s[event.source] += event.trips * seconds
        common_s = sum(tabled_s.values())
        if common_s <= simulation.compute_s / 2:
            return self
        slowdowns = {line: measured_s[line] / seconds for line, seconds in tabled_s.items() if seconds}
        return replace(self, slowdowns=slowdowns, slowdown=sum(measured_s.values()) / common_s)

    def kernel_s(self, seconds: float, line: str) -> float:
        return seconds * self.slowdowns.get(line, self.slowdown)

    def collective_s(self, kind: str, size_bytes: float, group_size: int, ranks_per_node: int) -> float:
        for entry in self.profile.collectives:
            if entry.fit is not None and entry.kind == kind and self._devices(entry) == group_size:
                return entry.fit.seconds(size_bytes)
        return super().collective_s(kind, size_bytes, group_size, ranks_per_node)

    def copy_s(self, size_bytes: float, direction: Direction) -> float:
        measured = self.profile.copy_s(direction, size_bytes)
        return super().copy_s(size_bytes, direction) if measured is None else measured

    def copy(self, size_bytes: int, direction: Direction, kind: str = "copy") -> Timing:
        both_ways, timing = self.profile.both_ways(direction), super().copy(size_bytes, direction, kind)
        return timing if both_ways is None else replace(timing, both_ways=max(1.0, both_ways))

    def _devices(self, entry: CollectiveFit) -> int:
        sizes = {axis.name: axis.size for axis in self.profile.machine.axes}
        return math.prod(sizes[name] for name in entry.axes)


def costs_of(mesh: Mesh, profile: Profile | None = None) -> CostModel:
    """What things take on the devices of ``mesh``: by ``profile``, or else by the tables for them.

    Raises:
      ProfileMismatchError: the profile is of other devices.
    """
    kind, network = mesh.devices.flat[0].device_kind, network_of(mesh.devices.flat)
    hardware = hardware_of(kind)
    rates, overlap = published_rates(hardware.name), overlap_of(hardware.name)
    if profile is None:
        return CostModel(hardware, network, rates, overlap)
    found = {axis.name: axis.size for axis in profile.machine.axes}
    for what, expected, measured in (
        ("device kind", kind, profile.machine.device_kind),
        ("mesh", str(dict(mesh.shape)), str({name: found[name] for name in mesh.axis_names if name in found})),
        ("network", *(machine.network or _ASSUMED for machine in (machine_of(mesh), profile.machine))),
    ):
        if measured != expected:
            raise errors.ProfileMismatchError(what, expected, measured)
    return MeasuredCostModel(hardware, network, rates, overlap, profile=profile)


_ASSUMED = "400 Gbit/s a GPU"
"""Between GPUs whose network nobody describes."""
