"""Costs by what was measured, and by the tables where nothing was."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.entries import CollectiveFit, CopyDirection
from jax_deepcompile.costs.profile import Profile


@dataclass(frozen=True)
class MeasuredCostModel(CostModel):
    """A cost model whose collectives and copies are those of a profile, where it has them.

    Attributes:
      profile: measured on the mesh that is planned for. A group of devices is known by its size: two sets of axes of
      the
        same size but different links are told apart by the first of the profile only.
    """

    profile: Profile = field(kw_only=True)

    def collective_s(self, kind: str, size_bytes: float, group_size: int, ranks_per_node: int) -> float:
        for entry in self.profile.collectives:
            if entry.fit is not None and entry.kind == kind and self._devices(entry) == group_size:
                return entry.fit.seconds(size_bytes)
        return super().collective_s(kind, size_bytes, group_size, ranks_per_node)

    def copy_s(self, size_bytes: float, direction: Direction) -> float:
        measured = self.profile.copy_s(CopyDirection(direction.value), size_bytes)
        return super().copy_s(size_bytes, direction) if measured is None else measured

    def _devices(self, entry: CollectiveFit) -> int:
        sizes = {axis.name: axis.size for axis in self.profile.machine.axes}
        return math.prod(sizes[name] for name in entry.axes)
