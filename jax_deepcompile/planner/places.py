"""What is where between forward and backward, and between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax_deepcompile.planner.recomputation import RecomputeRegion
from jax_deepcompile.planner.state_on_host import HostLeaf

Loops = tuple[str, str]
"""The names of a forward and a backward loop; equal where both are one place."""


@dataclass(frozen=True)
class Places:
    """What is where between forward and backward; all else is computed again, or stays as the step was written.

    Attributes:
      kept: positions of activations that are at hand for backward, on the device or on the host.
      offloaded: names of what is on the host, of those and of what the step keeps anyway.
      state: leaves of the state that are on the host, between steps.
    """

    kept: Mapping[Loops, tuple[int, ...]] = field(default_factory=dict)
    offloaded: Mapping[Loops, tuple[str, ...]] = field(default_factory=dict)
    state: tuple[str, ...] = ()


NOWHERE = Places()
"""Nothing is kept that the program as it was written does not keep, nor on the host."""


def saved_s(region: RecomputeRegion, places: Places) -> float:
    """What a step computes less by what is at hand."""
    positions = places.kept.get(region.loops, ())
    freed = region.demand.freed([var for position in positions for var in region.activations[position].again])
    return region.step_s(sum(region.seconds[each] for each in freed))


def gained_s(region: RecomputeRegion, already: Places) -> float:
    """What is gained ``already``, beside what loops compute less."""
    away = already.offloaded.get(region.loops, ())
    here = [each for each in already.kept.get(region.loops, ()) if region.names[each] not in away]
    copied_s = sum(region.copying_s(each) for each in here) + sum(map(region.moving_s, away))
    return (0.0 if region.is_of_loops else saved_s(region, already)) - copied_s


def taken_bytes(regions: Sequence[RecomputeRegion], places: Places, state: Mapping[str, HostLeaf]) -> int:
    """What ``places`` take on the device more than the program as it was written, of its ``state``."""
    taken = -sum(state[name].freed_bytes for name in places.state if name in state)
    for region in regions:
        away = places.offloaded.get(region.loops, ())
        for place in places.kept.get(region.loops, ()):
            layers = region.in_flight if region.names[place] in away else region.layers
            taken += layers * region.activations[place].size_bytes
        moved = sum(each.size_bytes for each in region.residuals if each.name in away)
        taken += (region.in_flight - region.layers) * moved
    return taken
