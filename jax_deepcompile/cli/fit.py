"""``deepcompile fit``: the largest batch and the longest sequence that train, and what less memory costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_deepcompile import errors
from jax_deepcompile.cli.files import NO_FILES, Files, explained, told
from jax_deepcompile.cli.options import HERE, Cluster
from jax_deepcompile.cli.steps import StepRequest, sharded_step
from jax_deepcompile.planner.state_on_host import argument_bytes
from jax_deepcompile.report.headline import simulated_text
from jax_deepcompile.report.memory_curve import LimitedStep
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.stages import TracedStep, limited
from jax_deepcompile.step import ShardedStep

_SHARES = (0.75, 0.5, 0.35, 0.25)
"""Of the memory that a step takes which may take what it likes."""
_ANY_BYTES = 1 << 50
_PLANS = 6
"""Sizes that are planned, at most, to find the largest that fits."""
_NEAR = 1.125
"""How many times as large what does not fit may be."""
_TIMES, _MOST_TIMES = 4, 64
"""As large, at least and at most, is what is tried next while all fit."""
_BLOCK = 64
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
class Fit:
    """What fits.

    Attributes:
      given: the size that the step came with.
      batch, length: the largest that fits, and the smallest tried that does not, of each; empty where it has none.
      curve: limits, the largest first.
      notes: what could not be tried, and why.
    """

    devices: int
    given: Size
    batch: tuple[Size, ...]
    length: tuple[Size, ...]
    curve: tuple[LimitedStep, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"as given, {self._size(self.given)}: {_takes(self.given.takes)}"]
        for what, sizes in (("batch", self.batch), ("sequence", self.length)):
            lines += [f"{_tried(each, what)}, {self._size(each)}: {_takes(each.takes)}" for each in sizes]
        lines += [*self.notes, "", "memory limit, as given:"]
        lines += [f"  {errors.sized(point.limit_bytes):>12}: {_takes(point)}" for point in self.curve]
        return "\n".join(lines)

    def _size(self, size: Size) -> str:
        of = f" of {size.length:,}" * bool(size.length)
        return f"{size.examples:,} examples{of} ({size.examples / self.devices:g} a device)"


def _tried(size: Size, what: str) -> str:
    return f"largest {what}" if size.fits else f"a larger {what}"


def _takes(step: LimitedStep) -> str:
    fits = step.fits
    if fits is None:
        excess = errors.sized(step.needed_bytes - step.limit_bytes)
        return f"does not fit, takes {errors.sized(step.needed_bytes)}, {excess} more"
    host = f", {errors.sized(fits.host_bytes)} of the host's" * bool(fits.host_bytes)
    return f"{fits.step_s:.4g} s, {errors.sized(fits.peak_bytes)}{host}"


def fit(request: StepRequest, cluster: Cluster = HERE, files: Files = NO_FILES) -> str:
    """Finds the largest batch and the longest sequence that train, and what a step takes under ever less memory.

    All of it is planned and simulated, a dozen plans or so; which size is next is estimated from the last one. Files
    show the step as it is given.
    """
    files.check(request.out)
    with Progress(f"fit {request.step}") as progress:
        step, args = sharded_step(request, cluster, progress)
        found = what_fits(step, args, request.step)
        traced = step.trace(*args)
        written = files.write(traced, progress) if found.given.fits else {}
        said = simulated_text(step.mesh, traced.compilation.context.options.profile)
        text = "\n".join([said, str(found), *told(written)])
        return request.answer(lambda: explained(traced, written, **dataclasses.asdict(found)), text)


def what_fits(step: ShardedStep, args: tuple, what: str) -> Fit:
    """See ``fit``.

    Raises:
      NothingSimulatedError: nothing is for these devices.
      StepSpecError: the step has no batch.
    """
    traced = step.trace(*args)
    batch = [place for place in range(len(args)) if place in traced.compilation.signature.batch]
    if not batch:
        raise errors.StepSpecError(what, "it has no batch to try sizes of; batch_argnums= names it")
    shaped, given_bytes, devices = _Shaped(args, tuple(batch)), argument_bytes(traced.sharded), step.mesh.size

    def tried(examples: int, length: int) -> Size:
        with Progress(f"{examples:,} examples" + f" of {length:,}" * bool(length)):
            return Size(examples, length, given_bytes, _limited(step.trace(*shaped.of(examples, length)), what))

    examples, length, notes = shaped.examples, shaped.length, []
    given = tried(examples, length)
    parts = traced.compilation.context.options.microbatches
    assert isinstance(parts, int), "of several numbers of microbatches one was chosen"
    sizes = _largest(given, examples, devices * parts, lambda count: tried(count, length))
    lengths: tuple[Size, ...] = ()
    if length:
        try:
            block = _BLOCK if length % _BLOCK == 0 else 1
            lengths = _largest(given, length, block, lambda count: tried(examples, count))
        except (TypeError, ValueError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            notes.append(f"the step takes no other sequence length: {first}")
    with Progress("with ever less memory"):
        needed = limited(traced.compilation, _ANY_BYTES)
        everything = dataclasses.replace(needed, limit_bytes=needed.needed_bytes)
        limits = [math.ceil(share * everything.limit_bytes) for share in _SHARES]
        curve = traced.memory_curve([everything, given.takes, *limits])
    return Fit(devices, given, sizes, lengths, curve, tuple(notes))


def _limited(traced: TracedStep, what: str) -> LimitedStep:
    options, platform = traced.compilation.context.options, traced.compilation.context.use.platform
    if platform == "cpu" and options.memory_limit is None:
        raise errors.NothingSimulatedError(what, traced.mesh.size, platform)
    return limited(traced.compilation, options.memory_limit)


def _largest(given: Size, count: int, unit: int, tried: Callable[[int], Size]) -> tuple[Size, ...]:
    """The largest count that fits, in multiples of ``unit``, and the smallest that was seen not to.

    Args:
      given: what ``count`` takes.
      tried: what others take.
    """
    good, bad = ((count, given), None) if given.fits else (None, (count, given))
    too_large = [(0, given.state_bytes), *([] if given.fits else [(count, given.takes.needed_bytes)])]
    for _ in range(_PLANS):
        least = (good[0] // unit + 1) * unit if good else unit
        most = (bad[0] - 1) // unit * unit if bad else _MOST_TIMES * least
        if least > most or (good and bad and bad[0] <= _NEAR * good[0]):
            break
        guess = _beyond(*good) if good and not bad else _between(*too_large[-2:], given.takes.limit_bytes)
        count = min(max(int(guess) // unit * unit, int(_NEAR * least) // unit * unit), most)
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


class _Shaped:
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
        self._more = 1 if given > 1 and (given - 1) % _BLOCK == 0 else 0
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
