"""What the probes of collectives and copies may take, and what is made of their times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax_deepcompile.costs.entries import LinearFit, Source, analytical
from jax_deepcompile.profilers.fit import fit_line
from jax_deepcompile.profilers.timing import measured, reason

NOT_ATTACHED = "the devices of this mesh are not attached to this process"


@dataclass(frozen=True)
class ProbeLimits:
    """How far the probes of collectives and copies go.

    Attributes:
      limit_bytes: memory a probe may take on each device, everything it allocates counted.
      smallest_bytes: the first size.
      largest_bytes: the size that is not exceeded even where memory would allow it.
      growth: each size is this many times the one before.
      runs: measurements of each size; the median counts.
      traffic_bytes: a run repeats its collective until it has moved this much,
      most_repeats: but not more often than this.
    """

    limit_bytes: int
    smallest_bytes: int = 1 << 10
    largest_bytes: int = 1 << 28
    growth: int = 8
    runs: int = 5
    traffic_bytes: int = 1 << 25
    most_repeats: int = 16

    def sizes_bytes(self, multiple_bytes: int) -> Iterator[int]:
        """Sizes from small to large, each a multiple of ``multiple_bytes`` and within the limit."""
        size_bytes = self.smallest_bytes
        while size_bytes <= self.largest_bytes:
            rounded_bytes = -(-size_bytes // multiple_bytes) * multiple_bytes
            if rounded_bytes > self.limit_bytes:
                return
            yield rounded_bytes
            size_bytes = rounded_bytes * self.growth

    def repeats(self, size_bytes: int) -> int:
        return max(1, min(self.most_repeats, self.traffic_bytes // size_bytes))


def fit_or_fall_back(points: Iterable[tuple[int, float]], limits: ProbeLimits) -> tuple[LinearFit | None, Source]:
    """The line through what could be measured, or why there is none.

    Args:
      points: pairs (bytes, seconds), measured as they are asked for; ends early, or fails, where no more can be.
      limits: that they were measured under.
    """
    taken: list[tuple[int, float]] = []
    failure = ""
    try:
        for point in points:
            taken.append(point)
    except (RuntimeError, NotImplementedError) as error:
        failure = reason(error)
    if len(taken) < 2:
        few = f"a limit of {limits.limit_bytes} bytes a device leaves no two sizes to measure"
        return None, analytical(failure or few)
    return fit_line(taken), measured(limits.runs, failure and f"larger sizes failed: {failure}")
