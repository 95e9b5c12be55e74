"""What a step takes under ever less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax_deepcompile.planner.plan import Prediction
from jax_deepcompile.report.words import bytes_text, seconds_text


@dataclass(frozen=True, repr=False)
class LimitedStep:
    """A step planned under one memory limit.

    Attributes:
      limit_bytes: device memory that it may take.
      fits: what it takes, simulated; None where it does not fit.
      needed_bytes: of device memory.
    """

    limit_bytes: int
    fits: Prediction | None
    needed_bytes: int

    def __repr__(self) -> str:
        takes = f"{seconds_text(self.fits.step_s)} in {bytes_text(self.needed_bytes)}" if self.fits else "does not fit"
        return f"LimitedStep(of {bytes_text(self.limit_bytes)}: {takes})"

    def under(self, limit_bytes: int) -> LimitedStep | None:
        """What is known of a smaller limit without planning for it: what fits it too, or that nothing does."""
        is_known = self.fits is None or self.needed_bytes <= limit_bytes
        return replace(self, limit_bytes=limit_bytes) if is_known and limit_bytes <= self.limit_bytes else None


def monotone(points: Sequence[LimitedStep]) -> tuple[LimitedStep, ...]:
    """``points``, the largest limit first, no slower than under a smaller one, whose plan fits."""
    best: LimitedStep | None = None
    found: list[LimitedStep] = []
    for point in sorted(points, key=lambda each: each.limit_bytes):
        if best is None or best.fits is None or (point.fits is not None and point.fits.step_s <= best.fits.step_s):
            best = point
        found.append(replace(best, limit_bytes=point.limit_bytes) if best.fits is not None else point)
    return tuple(reversed(found))
