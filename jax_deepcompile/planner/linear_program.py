"""Linear programs whose variables are mostly 0 or 1, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from jax_deepcompile.runtime.quiet import STDOUT, silenced

Terms = Mapping[int, float]
"""Variables by number, and what each is multiplied by."""


class LinearProgram:
    """Variables that are 0 or 1, or any number, and cost something."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self._uppers: list[float] = []
        self._wholes: list[bool] = []
        self._rows: list[tuple[Terms, float]] = []

    def variable(self, cost: float = 0.0, upper: float = 1.0) -> int:
        """The number of a new one: 0 or 1, or with another ``upper`` bound anything up to that."""
        self.costs.append(cost)
        self._uppers.append(upper)
        self._wholes.append(upper == 1.0)
        return len(self.costs) - 1

    def at_least(self, terms: Terms, least: float) -> None:
        """The sum of ``terms`` is no less than ``least``."""
        self._rows.append((terms, least))

    def rather(self, terms: Terms) -> None:
        """The sum of ``terms`` is what is made small, the costs so far only beside that."""
        self.costs = [_BESIDE * cost + terms.get(var, 0.0) for var, cost in enumerate(self.costs)]

    def solved(self) -> np.ndarray | None:
        """What each variable is where the sum of costs is smallest; None if there is no solution."""
        entries = [(row, var, value) for row, (terms, _) in enumerate(self._rows) for var, value in terms.items()]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self._rows), len(self.costs))
        least: Any = [low for _, low in self._rows]
        upper: Any = np.array(self._uppers)
        constraints = LinearConstraint(coo_array((values, (rows, columns)), shape).tocsr(), least)
        with silenced(STDOUT):  # HiGHS prints a line of its developers' now and then
            found = milp(
                np.array(self.costs),
                integrality=np.array(self._wholes, int),
                bounds=Bounds(0.0, upper),
                constraints=constraints,
                options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
            )
        return None if found.x is None else np.where(self._wholes, np.round(found.x), found.x)


def times(terms: Terms, factor: float) -> Terms:
    return {var: factor * value for var, value in terms.items()}


def total(several: Iterable[Terms]) -> Terms:
    """Of terms of different variables."""
    return {var: value for terms in several for var, value in terms.items()}


_BESIDE = 1e-3
"""GiB that a second counts as where memory is what is made small."""

_SECONDS, _GAP = 20.0, 1e-4
"""What solving may take, and the share of the costs by which a solution may miss the best."""
