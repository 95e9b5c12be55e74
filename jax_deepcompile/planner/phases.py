"""What layer loops take in a step, and what may be hidden beside them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.simulation import Totals
from jax_deepcompile.costs.streams import Part
from jax_deepcompile.planner.candidate import Candidate


@dataclass(frozen=True)
class Phases:
    """What layer loops take in a step.

    Attributes:
      forward_s: kernels of loops that reduce no gradients; where none does, a third of all but what is computed again.
      backward_s: kernels of all others.
      network_s: their collectives.
      bytes_per_s: that those gather and reduce.
      to_host_bytes_per_s, from_host_bytes_per_s: of copies; all GPUs of a node copy at the same time.
      both_ways_bytes_per_s: of copies in each direction while others go the other way.
    """

    forward_s: float
    backward_s: float
    network_s: float
    bytes_per_s: float
    to_host_bytes_per_s: float = math.inf
    from_host_bytes_per_s: float = math.inf
    both_ways_bytes_per_s: float = math.inf

    @classmethod
    def of(cls, best: Candidate, costs: CostModel) -> Phases:
        forward, backward = Totals(), Totals()
        for loop in best.simulation.loops:
            if loop.is_innermost and loop.trip.reduced_bytes:
                backward = backward.plus(loop.trip, loop.executions * loop.trip_count)
            elif loop.is_innermost:
                forward = forward.plus(loop.trip, loop.executions * loop.trip_count)
        forward_s, backward_s = forward.compute_s, backward.compute_s
        if not backward_s:
            forward_s = (forward.compute_s - forward.kernels_s.get(Part.AGAIN, 0.0)) * _FORWARD
            backward_s = forward.compute_s - forward_s
        moved = backward.gathered_bytes + backward.reduced_bytes
        copies = [costs.copy(_MANY_BYTES, direction) for direction in (Direction.TO_HOST, Direction.FROM_HOST)]
        rates = [_MANY_BYTES / copy.seconds for copy in copies]
        both_ways = min(rate / copy.both_ways for rate, copy in zip(rates, copies, strict=True))
        return cls(
            forward_s,
            backward_s,
            backward.communication_s,
            moved / max(backward.communication_s, 1e-12) if moved else math.inf,
            to_host_bytes_per_s=rates[0],
            from_host_bytes_per_s=rates[1],
            both_ways_bytes_per_s=both_ways,
        )

    @property
    def alone_s_per_byte(self) -> float:
        """What copies in and out again take longer than if others went the other way meanwhile."""
        there, back = 1 / self.to_host_bytes_per_s, 1 / self.from_host_bytes_per_s
        return max(there + back - 1 / self.both_ways_bytes_per_s, 0.0)

    def update_s(self, sizes: Collection[int]) -> float:
        """What leaves of those bytes wait for around their update: one comes in while the one before goes out.

        Nothing goes out while the first comes in, and nothing comes in while the last goes out: there are few bytes in
        flight if no leaf is large.
        """
        return sum(sizes) / self.both_ways_bytes_per_s + max(sizes, default=0) * self.alone_s_per_byte


_MANY_BYTES = 1 << 30

_FORWARD = 1 / 3
"""Of the kernels of layers: for each product of forward backward has two."""
