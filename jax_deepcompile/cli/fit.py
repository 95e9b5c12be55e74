"""``deepcompile fit``: the largest batch and the longest sequence that train, and what less memory costs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jax_deepcompile import errors
from jax_deepcompile.cli.files import NO_FILES, Files, explained, told
from jax_deepcompile.cli.options import HERE, Cluster
from jax_deepcompile.cli.sizes import BLOCK, Shaped, Size, Sizes, largest
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

    All of it is planned and simulated, a dozen plans or so, but sizes on the way that fit without a plan; which size is
    next is estimated from the last one. Files show the step as it is given.
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
    _require_limit(traced, what)
    sizes = Sizes(step, Shaped(args, tuple(batch)), argument_bytes(traced.sharded))
    examples, length, notes = sizes.shaped.examples, sizes.shaped.length, []
    given = sizes.planned(examples, length)
    limit = given.takes.limit_bytes
    parts = traced.compilation.context.options.microbatches
    assert isinstance(parts, int), "of several numbers of microbatches one was chosen"
    found = largest(given, examples, step.mesh.size * parts, lambda count: sizes.tried(count, length, limit))
    batches, lengths = tuple(map(sizes.whole, found)), ()
    if length:
        try:
            block = BLOCK if length % BLOCK == 0 else 1
            found = largest(given, length, block, lambda count: sizes.tried(examples, count, limit))
            lengths = tuple(map(sizes.whole, found))
        except (TypeError, ValueError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            notes.append(f"the step takes no other sequence length: {first}")
    with Progress("with ever less memory"):
        is_scarce = given.takes.needed_bytes > given.takes.limit_bytes / 2
        needed = limited(traced.compilation, _ANY_BYTES) if is_scarce else given.takes
        everything = dataclasses.replace(needed, limit_bytes=needed.needed_bytes)
        limits = [math.ceil(share * everything.limit_bytes) for share in _SHARES]
        curve = traced.memory_curve([everything, given.takes, *limits])
    return Fit(step.mesh.size, given, batches, lengths, curve, tuple(notes))


def _require_limit(traced: TracedStep, what: str) -> None:
    options, platform = traced.compilation.context.options, traced.compilation.context.use.platform
    if platform == "cpu" and options.memory_limit is None:
        raise errors.NothingSimulatedError(what, traced.mesh.size, platform)
