"""A ragged matrix product as what it is: rows in order, runs of which meet a matrix each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TILE_COSTS_ROWS = 256
"""What a tile costs besides its rows, in rows: its matrix is read and written once more. By simulation that is as much
as five hundred to a thousand rows on an H100; on CPUs it is less. Near the best size of a tile it matters little."""

_FEW_ROWS, _MANY_ROWS = 16, 64
"""A tile of few rows, and one of more, has a multiple of these."""


@dataclass(frozen=True)
class RaggedProduct:
    """How the rows of a ``ragged_dot_general`` are cut into tiles, each of which meets one matrix.

    Where rows stay, ``x[rows, depth], y[groups, depth, columns] -> [rows, columns]``; where they are summed over,
    ``x[rows, depth], y[rows, columns] -> [groups, depth, columns]``.

    Attributes:
      x_rows: the dimensions of ``x`` that make up its rows, in the order of rows.
      y_rows: those of ``y`` where rows are summed over; else its groups' dimension.
      sums_rows: whether rows are summed over.
      outer: how often the groups begin again.
      between: how many rows is each of those that are counted.
      rows: all of them.
      groups: different ones.
      depth, columns: elements of a row of ``x`` and of what it becomes or is multiplied with.
    """

    x_rows: tuple[int, ...]
    y_rows: tuple[int, ...]
    sums_rows: bool
    outer: int
    between: int
    rows: int
    groups: int
    depth: int
    columns: int

    @classmethod
    def of(cls, eqn: Any) -> RaggedProduct | None:
        """None of products of a batch, each of which has matrices of its own."""
        numbers, (x, y, sizes) = eqn.params["ragged_dot_dimension_numbers"], (each.aval.shape for each in eqn.invars)
        (x_contracted, y_contracted), (batch, _) = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        if batch:
            return None
        sums_rows = ragged in x_contracted
        x_rows = tuple(x_contracted) if sums_rows else tuple(dim for dim in range(len(x)) if dim not in x_contracted)
        y_rows = tuple(y_contracted) if sums_rows else tuple(numbers.rhs_group_dimensions)
        rows, depth = _elements(x, x_rows), _elements(x, x_contracted)
        place = x_rows.index(ragged)
        return cls(
            x_rows=x_rows,
            y_rows=y_rows,
            sums_rows=sums_rows,
            outer=_elements(x, x_rows[:place]),
            between=_elements(x, x_rows[place + 1 :]),
            rows=rows,
            groups=sizes[-1],
            depth=math.prod(x) // max(rows, 1) if sums_rows else depth,
            columns=math.prod(y) // max(rows if sums_rows else sizes[-1] * depth, 1),
        )

    @property
    def runs(self) -> int:
        """Runs of rows of one group."""
        return self.outer * self.groups

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: where runs are equally long, what tiles cost and what their last ones waste is least."""
        best = math.sqrt(_TILE_COSTS_ROWS * self.rows / max(self.runs, 1))
        step = _FEW_ROWS if best <= _MANY_ROWS else _MANY_ROWS
        return step * max(math.ceil(best / step), 1)

    @property
    def tiles(self) -> int:
        """As many as there can be, whatever the sizes of groups."""
        runs = min(self.runs, self.rows)
        return runs + (self.rows - runs) // self.tile_rows

    @property
    def pays_in_tiles(self) -> bool:
        """Whether tiles cost less than every row with every matrix."""
        return self.tiles * (self.tile_rows + _TILE_COSTS_ROWS) < self.rows * self.groups


def _elements(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[dim] for dim in dims)
