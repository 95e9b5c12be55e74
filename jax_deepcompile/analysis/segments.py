"""Forward code that no loop runs, cut into segments: what one leaves for the next, and what backward reads of each.

Unrolled layers leave a stream of activations, which few values cross between two blocks; those are where a segment can
begin again.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from jax_deepcompile.analysis.equal_work import is_repeatable
from jax_deepcompile.analysis.gathers import derived
from jax_deepcompile.analysis.names import phase
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import COLLECTIVES
from jax_deepcompile.ir.rewrite import renamed, unguarded
from jax_deepcompile.ir.traversal import contains, variables

_LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True)
class Tape:
    """What backward reads of forward in one jaxpr.

    Attributes:
      jaxpr: open.
      with_loops: whether a loop can be computed again, too, as a whole.
    """

    jaxpr: Any
    with_loops: bool = False

    @cached_property
    def guarded(self) -> dict:
        """For results of barriers what went into them."""
        return unguarded(self.jaxpr)

    @cached_property
    def guarded_forward(self) -> dict:
        """Likewise, of forward's barriers alone."""
        later = {var for place in self.readers for var in self.jaxpr.eqns[place].outvars}
        return {var: source for var, source in self.guarded.items() if var not in later}

    @cached_property
    def cheap(self) -> dict:
        """What is made of one input by cheap work, as gathered parameters are."""
        return derived(self.jaxpr, dict.fromkeys((*self.jaxpr.constvars, *self.jaxpr.invars)))

    @cached_property
    def readers(self) -> list[int]:
        """Positions of the equations of backward, and of what comes after it."""
        phases = list(map(phase, self.jaxpr.eqns))
        if " @backward" not in phases:
            return []
        return [place for place in range(phases.index(" @backward"), len(phases)) if phases[place] != " @forward"]

    @cached_property
    def makers(self) -> dict[Any, int]:
        """Positions of the equations of forward that can be computed again, by what they make."""
        later = set(self.readers)
        return {
            var: place
            for place, eqn in enumerate(self.jaxpr.eqns)
            if place not in later and eqn.primitive.name != "optimization_barrier" and self._is_again(eqn)
            for var in eqn.outvars
        }

    def pass_of(self, place: int) -> int:
        """The same for what forward does before backward reads anything of it: a step may have several of either."""
        return bisect.bisect(self.readers, place)

    def _is_again(self, eqn: Any) -> bool:
        """Of collectives those of parameters alone, which backward gathers anyway."""
        if not is_repeatable(eqn) or (contains(eqn, _LOOPS) and not self.with_loops):
            return False
        return not contains(eqn, COLLECTIVES) or all(var in self.cheap for var in eqn.outvars)

    def operands(self, place: int) -> list:
        """What the equation at ``place`` reads, barriers left out."""
        return variables(renamed(atom, self.guarded) for atom in self.jaxpr.eqns[place].invars)

    @cached_property
    def residuals(self) -> list:
        """What backward reads that forward makes, but for parameters, in program order."""
        read = {var for place in self.readers for var in self.operands(place)}
        return [var for var in self.makers if var in read and var not in self.cheap and has_numbers(var)]

    @cached_property
    def left(self) -> list:
        """All that forward makes, with work, and backward reads but no result of the jaxpr is, in program order."""
        read = {var for place in self.readers for var in self.operands(place)}
        read -= {renamed(atom, self.guarded) for atom in variables(self.jaxpr.outvars)}
        later = set(self.readers)
        return [
            var
            for place, eqn in enumerate(self.jaxpr.eqns)
            if place not in later and eqn.primitive.name != "optimization_barrier"
            for var in eqn.outvars
            if var in read and var not in self.cheap and has_numbers(var) and var.aval.shape
        ]

    def needed(self, targets: Collection, given: Collection) -> list[int]:
        """Positions of the equations that make ``targets`` of what is ``given`` and of what is always there."""
        waiting, found = [var for var in targets if var not in given], set[int]()
        while waiting:
            place = self.makers.get(waiting.pop())
            if place is not None and place not in found:
                found.add(place)
                waiting += [var for var in self.operands(place) if var not in given]
        return sorted(found)

    def before(self, kept: Collection) -> list:
        """The residuals, but for those ``kept``, that are made before the last of these."""
        last = max((self.makers[var] for var in kept), default=-1)
        return [var for var in self.residuals if self.makers[var] < last and var not in kept]

    def without_cheap(self, places: Sequence[int]) -> list[int]:
        """Those of ``places`` that make more than a parameter in another form."""
        return [place for place in places if not set(self.jaxpr.eqns[place].outvars) <= self.cheap.keys()]


def has_numbers(var: Any) -> bool:
    """Whether a variable is an array of numbers, not of random keys."""
    return isinstance(var.aval.dtype, np.dtype)


def segment_inputs(tape: Tape, on_host: bool = False) -> tuple:
    """What is kept of forward where backward computes the rest again by segments, in as little memory as can be.

    That is what the segments are given, and what backward reads of the largest one. The last segment is not computed
    again: backward begins with it. Nothing if that keeps hardly fewer bytes.

    Args:
      on_host: what segments are given is on the host meanwhile; so there are more of them, and smaller ones.
    """
    places = tape.without_cheap(tape.needed(tape.residuals, ()))
    order = {place: index for index, place in enumerate(places)}
    until = _last_reads(tape, places, order)
    crossing = np.zeros(len(places) + 1)
    for var, last in until.items():
        crossing[order[tape.makers[var]]] += size_bytes(var)
        crossing[last] -= size_bytes(var)
    crossing = np.cumsum(crossing)[:-1]
    left = np.zeros(len(places))
    for var in tape.residuals:
        if tape.makers[var] in order:
            left[order[tape.makers[var]]] += size_bytes(var)
    cuts = _best_cuts(crossing, np.array(list(accumulate(left))), _COPIED if on_host else 1.0)
    return tuple(var for var, last in until.items() if any(order[tape.makers[var]] <= cut < last for cut in cuts))


def _last_reads(tape: Tape, places: Sequence[int], order: dict[int, int]) -> dict[Any, int]:
    """For what is made at ``places`` where it is read last among them, in program order."""
    until: dict[Any, int] = {}
    for place in places:
        for var in tape.operands(place):
            if tape.makers.get(var) in order and var not in tape.cheap:
                until[var] = order[place]
    return dict(sorted(until.items(), key=lambda item: tape.makers[item[0]]))


def _best_cuts(crossing: np.ndarray, left: np.ndarray, worth: float) -> list[int]:
    """Positions after which to cut: the bytes that cross them and those of the largest segment are fewest.

    Args:
      crossing: bytes that are made up to each position and read later.
      left: bytes that backward reads of all up to each position.
      worth: what a byte that crosses a cut counts as.
    """
    if not len(crossing) or not left[-1]:
        return []
    higher = (crossing[:-1] < crossing[1:]) | ((crossing[:-1] == crossing[1:]) & (np.diff(left) > 0))
    lower = np.r_[True, crossing[1:] <= crossing[:-1]] & np.r_[higher, False]
    minima = [int(place) for place in np.flatnonzero(lower)]
    candidates = sorted(heapq.nsmallest(_MOST, minima, key=crossing.__getitem__))
    best: tuple[float, list[int]] = (_WORTH * left[-1], [])
    for count in _COUNTS:
        cuts = _fewest_bytes(candidates, crossing, left, left[-1] / count)
        if cuts is None:
            break
        edges = np.r_[0.0, left[cuts], left[-1]]
        best = min(best, (float(worth * crossing[cuts].sum() + np.diff(edges).max()), cuts))
    return best[1]


_WORTH = 0.9
"""Of what backward reads: for saving less nothing is computed again."""

_COPIED = 0.25
"""What a byte on the host counts as: it takes no memory of the device, but copies take time."""

_MOST = 512
"""Places to cut that are looked at: those that the fewest bytes cross."""

_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def _fewest_bytes(candidates: Sequence[int], crossing: np.ndarray, left: np.ndarray, most: float) -> list[int] | None:
    """Cuts that the fewest bytes cross, with no more than ``most`` bytes left of a segment; None if there are none."""
    ends = [*candidates, len(left) - 1]
    total, before = [0.0] * len(ends), [-1] * len(ends)
    for at, end in enumerate(ends):
        costs = [(total[one] + crossing[ends[one]], one) for one in range(at) if left[end] - left[ends[one]] <= most]
        if left[end] <= most:
            costs.append((0.0, -1))
        total[at], before[at] = min(costs, default=(float("inf"), -1))
    if total[-1] == float("inf"):
        return None
    cuts, at = [], before[-1]
    while at >= 0:
        cuts.append(ends[at])
        at = before[at]
    return cuts[::-1]
