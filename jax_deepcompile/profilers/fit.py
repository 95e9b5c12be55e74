"""Latency and bandwidth from times at several sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from jax_deepcompile.costs.entries import LinearFit


def fit_line(points: Sequence[tuple[int, float]]) -> LinearFit:
    """The line ``seconds = latency + bytes / bandwidth`` with the least sum of relative deviations.

    Relative, because the sizes span decades; the sum of deviations and not of their squares, so that a minority of
    disturbed measurements does not move it. Neither term is ever negative.

    Args:
      points: pairs (bytes, seconds) of at least two different sizes.
    """
    sizes_bytes, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    rows = np.stack([np.ones_like(sizes_bytes), sizes_bytes], axis=1) / seconds[:, None]
    line = _least_deviations(rows)
    residual = float(np.sqrt(np.mean((1 - rows @ line) ** 2)))
    return LinearFit(float(line[0]), float(line[1]), residual, tuple(points))


def _least_deviations(rows: np.ndarray) -> np.ndarray:
    """The ``line >= 0`` with the least ``sum |1 - rows @ line|``, as a linear program.

    Its columns are scaled: seconds and seconds per byte are decades apart.
    """
    scale = rows.max(axis=0)
    count = len(rows)
    deviation = np.eye(count)
    solved = linprog(
        np.concatenate([np.zeros(2), np.ones(count)]),
        A_ub=np.block([[rows / scale, -deviation], [-rows / scale, -deviation]]),
        b_ub=np.concatenate([np.ones(count), -np.ones(count)]),
    )
    return solved.x[:2] / scale
