"""Sizes of the batch: what they take, and the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_deepcompile.planner.strategies.keep_activations import KeepActivations
from jax_deepcompile.report.memory_curve import LimitedStep
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.stages import TracedStep, limited
from jax_deepcompile.step import ShardedStep

_SIZES = 10
"""That are tried, at most, to find the largest that fits."""
_NEAR = 1.125
"""How many times as large what does not fit may be."""
_TIMES, _MOST_TIMES = 4, 64
"""As large, at least and at most, is what is tried next while all fit."""
BLOCK = 64
"""Sequences are as long as a multiple of this; tokens may be one more than what is learned from."""


@dataclass(frozen=True)
class Size:
    """A size of the batch that was planned.

    Attributes:
      examples: of all devices.
      length: of every example; 0 where batches have no sequences.
      state_bytes: of device memory, that no size changes.
      takes: under the limit.
    """

    examples: int
    length: int
    state_bytes: int
    takes: LimitedStep

    @property
    def fits(self) -> bool:
        return self.takes.fits is not None


@dataclass(frozen=True)
class Sizes:
    """A step's sizes, and what they take under its own limit."""

    step: ShardedStep
    shaped: Shaped
    state_bytes: int

    def planned(self, examples: int, length: int) -> Size:
        return self._size(examples, length, _planned)

    def tried(self, examples: int, length: int, limit_bytes: int) -> Size:
        """As partitioned, or planned to fit and not to be fast: sizes on the way are many, as are compilations."""

        def takes(traced: TracedStep) -> LimitedStep:
            own = traced.compilation.context.options.passes
            found = limited(traced.compilation, limit_bytes, passes=())
            more = (KeepActivations(),) if own is None else own
            return found if found.fits else limited(traced.compilation, limit_bytes, passes=more)

        return self._size(examples, length, takes)

    def _size(self, examples: int, length: int, takes: Callable[[TracedStep], LimitedStep]) -> Size:
        with Progress(f"{examples:,} examples" + f" of {length:,}" * bool(length)):
            traced = self.step.trace(*self.shaped.of(examples, length))
            return Size(examples, length, self.state_bytes, takes(traced))

    def whole(self, size: Size) -> Size:
        """As it trains."""
        planned = self.planned(size.examples, size.length) if size.fits else size
        return planned if planned.fits else size


def _planned(traced: TracedStep) -> LimitedStep:
    return limited(traced.compilation, traced.compilation.context.options.memory_limit)


def largest(given: Size, count: int, unit: int, tried: Callable[[int], Size]) -> tuple[Size, ...]:
    """The largest count that fits, in multiples of ``unit``, and the smallest that was seen not to.

    Args:
      given: what ``count`` takes.
      tried: what others take.
    """
    good, bad = ((count, given), None) if given.fits else (None, (count, given))
    too_large = [(0, given.state_bytes), *([] if given.fits else [(count, given.takes.needed_bytes)])]
    for _ in range(_SIZES):
        least = (good[0] // unit + 1) * unit if good else unit
        most = (bad[0] - 1) // unit * unit if bad else _MOST_TIMES * least
        if least > most or (good and bad and bad[0] <= _NEAR * good[0]):
            break
        guess = _beyond(*good) if good and not bad else _between(*too_large[-2:], given.takes.limit_bytes)
        if good:
            guess = max(guess, _NEAR * good[0], _as_a_power(good, bad) if bad else 0)
        count = min(max(int(guess) // unit * unit, least), most)
        size = tried(count)
        good, bad = ((count, size), bad) if size.fits else (good, (count, size))
        too_large += [] if size.fits else [(count, size.takes.needed_bytes)]
    return tuple(each[1] for each in (good, bad) if each is not None)


def _beyond(count: int, size: Size) -> float:
    """What may fit, by what does; that may have taken more memory than it had to, because that was there."""
    room_bytes, used_bytes = (each - size.state_bytes for each in (size.takes.limit_bytes, size.takes.needed_bytes))
    return count * max(_TIMES, room_bytes / max(used_bytes, 1))


def _between(one: tuple[int, int], other: tuple[int, int], limit_bytes: int) -> float:
    """What may fit: on the line through two sizes, which no plan could make smaller."""
    bytes_each = (other[1] - one[1]) / (other[0] - one[0])
    return other[0] - (other[1] - limit_bytes) / bytes_each if bytes_each > 0 else 0.0


def _as_a_power(good: tuple[int, Size], bad: tuple[int, Size]) -> float:
    """What may fit, where memory grows as a power of the count, as attention's scores do with the sequence."""
    (few, fits), (many, does_not) = good, bad
    each = (fits.takes.needed_bytes, fits.takes.limit_bytes, does_not.takes.needed_bytes)
    used, limit, needed = (bytes_ - fits.state_bytes for bytes_ in each)
    if not 0 < used < limit < needed:
        return 0.0
    power = math.log(needed / used) / math.log(many / few)
    return few * (limit / used) ** (1 / power)


class Shaped:
    """A call's arguments as shapes, of any batch.

    Attributes:
      examples, length: as they were given; ``length`` is 0 where not all arrays of whole numbers are as long.
    """

    def __init__(self, args: tuple, batch: Sequence[int]) -> None:
        self._args, self._batch = args, batch
        leaves = [leaf for place in batch for leaf in jax.tree.leaves(args[place]) if np.ndim(leaf)]
        self.examples = leaves[0].shape[0]
        lengths = {leaf.shape[1] for leaf in leaves if leaf.ndim > 1 and np.issubdtype(leaf.dtype, np.integer)}
        given = lengths.pop() if len(lengths) == 1 else 0
        self._more = 1 if given > 1 and (given - 1) % BLOCK == 0 else 0
        self.length = given - self._more

    def of(self, examples: int, length: int) -> tuple:
        """With so many examples, so long each."""

        def shaped(leaf: Any) -> Any:
            shape = list(np.shape(leaf))
            if shape:
                shape[0] = shape[0] * examples // self.examples
            if self.length and len(shape) > 1 and shape[1] == self.length + self._more:
                shape[1] = length + self._more
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype) if shape else leaf

        return tuple(jax.tree.map(shaped, arg) if place in self._batch else arg for place, arg in enumerate(self._args))
