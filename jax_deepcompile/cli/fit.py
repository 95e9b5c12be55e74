"""``deepcompile fit``: the largest batch and the longest sequence that train, and what less memory costs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_deepcompile import errors
from jax_deepcompile.cli.commands import HERE, Cluster, StepRequest, sharded_step
from jax_deepcompile.planner.plan import Prediction
from jax_deepcompile.planner.strategies.keep_activations import KeepActivations
from jax_deepcompile.planner.strategies.layer_loops import PipelineLoops
from jax_deepcompile.runtime.progress import Progress
from jax_deepcompile.step import ShardedStep
from jax_deepcompile.summary import Text

_GIB = 1 << 30
_SHARES = (0.75, 0.5, 0.35, 0.25)
"""Of the memory that a step takes which may take what it likes."""
_ANY_BYTES = 1 << 50
_DOUBLINGS, _HALVINGS = 8, 2
_BLOCK = 64
"""Sequences are as long as a multiple of this; tokens may be one more than what is learned from."""


@dataclass(frozen=True)
class Size:
    """A size of the batch that was planned.

    Attributes:
      examples: of all devices.
      length: of every example; 0 where batches have no sequences.
      fits: what it takes; None where it does not fit.
      needed_bytes: of device memory.
    """

    examples: int
    length: int
    fits: Prediction | None
    needed_bytes: int


@dataclass(frozen=True)
class Point:
    """A memory limit and what a step takes under it; None where it does not fit."""

    limit_bytes: int
    fits: Prediction | None
    needed_bytes: int


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
    curve: tuple[Point, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"as given, {self._size(self.given)}: {_takes(self.given.fits, self.given.needed_bytes)}"]
        for what, sizes in (("batch", self.batch), ("sequence", self.length)):
            lines += [f"largest {what}, {self._size(each)}: {_takes(each.fits, each.needed_bytes)}" for each in sizes]
        lines += [*self.notes, "", "memory limit, as given:"]
        lines += [f"  {point.limit_bytes / _GIB:8.2f} GiB: {_takes(*_of(point))}" for point in self.curve]
        return "\n".join(lines)

    def _size(self, size: Size) -> str:
        of = f" of {size.length:,}" * bool(size.length)
        return f"{size.examples:,} examples{of} ({size.examples / self.devices:g} a device)"


def _of(point: Point) -> tuple[Prediction | None, int]:
    return point.fits, point.needed_bytes


def _takes(fits: Prediction | None, needed_bytes: int) -> str:
    if fits is None:
        return f"does not fit, takes {needed_bytes / _GIB:.2f} GiB"
    host = f", {fits.host_bytes / _GIB:.2f} GiB of the host's" * bool(fits.host_bytes)
    return f"{fits.step_s:.4g} s, {fits.peak_bytes / _GIB:.2f} GiB{host}"


def fit(request: StepRequest, cluster: Cluster = HERE) -> str:
    """Finds the largest batch and the longest sequence that train, and what a step takes under ever less memory.

    All of it is planned and simulated; sizes are tried by what saves memory alone, and those that are printed planned.
    """
    step, args = sharded_step(request, cluster)
    found = what_fits(step, args, request.step)
    return json.dumps(dataclasses.asdict(found)) if request.json else Text(found)


def what_fits(step: ShardedStep, args: tuple, what: str) -> Fit:
    """See ``fit``.

    Raises:
      StepSpecError: nothing is simulated for these devices, or the step has no batch.
    """
    signature = step.trace(*args).compilation.signature
    batch = [place for place in range(len(args)) if place in signature.batch]
    if not batch:
        raise errors.StepSpecError(what, "it has no batch to try sizes of; batch_argnums= names it")
    shaped = _Shaped(args, tuple(batch))
    saving = step.reshard(passes=(PipelineLoops(), KeepActivations()))
    devices = step.mesh.size
    with Progress(f"fit {what}") as progress:

        def tried(by: ShardedStep, examples: int, length: int) -> Size:
            progress.say(f"{examples:,} examples" + f" of {length:,}" * bool(length))
            fits, needed = _planned(by, shaped.of(examples, length), what)
            return Size(examples, length, fits, needed)

        examples, length, notes = shaped.examples, shaped.length, []
        given = tried(step, examples, length)

        def largest(start: int, unit: int, size_of: Callable[[int], tuple[int, int]]) -> tuple[Size, ...]:
            found = _largest(lambda count: tried(saving, *size_of(count)), start, unit)
            return tuple(
                tried(step, each.examples, each.length) if each.fits is not None and each.examples else each
                for each in found
            )

        sizes = largest(examples, devices, lambda count: (count, length))
        lengths: tuple[Size, ...] = ()
        if length:
            try:
                lengths = largest(length, _BLOCK if length % _BLOCK == 0 else 1, lambda count: (examples, count))
            except (TypeError, ValueError) as error:
                first = next(iter(str(error).splitlines()), type(error).__name__)
                notes.append(f"the step takes no other sequence length: {first}")
        curve = tuple(_curve(step, args, what, progress))
    return Fit(devices, given, sizes, lengths, curve, tuple(notes))


def _planned(step: ShardedStep, args: tuple, what: str) -> tuple[Prediction | None, int]:
    """What a step is predicted to take, None where it does not fit, and its device memory."""
    try:
        prediction = step.plan(*args).prediction
    except errors.MemoryExceededError as error:
        return None, error.needed_bytes
    if prediction is None:
        raise errors.StepSpecError(what, "nothing is simulated for its devices: name GPUs, such as --gpu h100")
    return prediction, prediction.peak_bytes


def _largest(tried: Callable[[int], Size], start: int, unit: int) -> tuple[Size, ...]:
    """The largest count that fits, in multiples of ``unit``, and the smallest that was seen not to."""
    good: tuple[int, Size] | None = None
    bad: tuple[int, Size] | None = None
    count = start
    for _ in range(_DOUBLINGS):
        size = tried(count)
        if size.fits is not None:
            good, count = (count, size), 2 * count
        else:
            bad, count = (count, size), count // 2 // unit * unit
        if (good and bad) or count < unit:
            break
    for _ in range(_HALVINGS):
        if good is None or bad is None or bad[0] - good[0] <= unit:
            break
        middle = (good[0] + bad[0]) // 2 // unit * unit
        if middle in (good[0], bad[0]):
            break
        size = tried(middle)
        if size.fits is not None:
            good = middle, size
        else:
            bad = middle, size
    return tuple(each[1] for each in (good, bad) if each is not None)


def _curve(step: ShardedStep, args: tuple, what: str, progress: Progress) -> Iterator[Point]:
    """What a step takes under each limit, no less than under a smaller one, whose plan fits too."""
    everything, needed = _planned(step.reshard(memory_limit=_ANY_BYTES), args, what)
    assert everything is not None, "anything fits"
    points = [Point(needed, everything, needed)]
    for share in _SHARES:
        limit = math.ceil(share * needed)
        progress.say(f"a limit of {limit / _GIB:.2f} GiB")
        points.append(Point(limit, *_planned(step.reshard(memory_limit=limit), args, what)))
    best: Prediction | None = None
    monotone = []
    for point in reversed(points):
        if point.fits is not None and (best is None or point.fits.step_s <= best.step_s):
            best = point.fits
        monotone.append(Point(point.limit_bytes, best, point.needed_bytes if best is None else best.peak_bytes))
    return reversed(monotone)


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
