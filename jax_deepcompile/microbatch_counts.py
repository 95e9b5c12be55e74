"""Into how many microbatches a batch is divided where planning decides: each count is planned, the fastest is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from jax_deepcompile import errors
from jax_deepcompile.compiler import Compilation, Context
from jax_deepcompile.frontend.call import PureCall
from jax_deepcompile.ir.program import Program, Role
from jax_deepcompile.runtime.progress import Progress

_LEAST_GAIN = 0.001
"""The share of a step that more microbatches must save."""

_NO_FASTER = 2
"""After so many counts in a row that are no faster none is tried further on, unless the user named them."""


def compilation_of(context: Context, call: PureCall) -> Compilation:
    """``call`` compiled with as many microbatches as the options say or, of several, with those that plan fastest.

    Raises:
      MemoryExceededError: none of the counts fits; that of the least memory.
      MicrobatchNotDivisibleError: none of those that were named divides the batch.
    """
    given = context.options.microbatches
    if isinstance(given, int):
        return Compilation(context, call)
    named = () if isinstance(given, str) else tuple(given)
    tried: list[str] = []
    whole = Compilation(_with(context, 1), call, tried=tried)
    possible = _dividing(named, whole.program) if named else list(_divisors(whole.program))
    if not possible:
        return Compilation(_with(context, min(named)), call)  # says why none is
    best, refused, since = None, None, 0
    with Progress(f"microbatches of {context.name}") as progress:
        for count in possible:
            made = whole if count == 1 else Compilation(_with(context, count), call, tried=tried)
            try:
                expected = made.planned.plan.prediction
            except errors.MemoryExceededError as error:
                tried.append(f"{count} {'take' if count > 1 else 'takes'} {error.needed_bytes / 2**30:.2f} GiB")
                refused = min(filter(None, (refused, error)), key=lambda each: each.needed_bytes)
                continue
            except errors.WholeBatchNeededError:
                if count == 1 or (best is None and count == possible[-1]):
                    raise
                tried.append(f"{count} cannot be")
                continue
            if expected is None:
                return made
            tried.append(f"{count} in {expected.step_s:.4g} s")
            progress.say(tried[-1])
            if best is None or expected.step_s < (1 - _LEAST_GAIN) * best[0]:
                best, since = (expected.step_s, made), 0
            else:
                since += 1
            if since == _NO_FASTER and not named:
                break
    if best is None:
        raise refused or AssertionError("what is possible was tried")
    return best[1]


def _with(context: Context, microbatches: int) -> Context:
    return replace(context, options=replace(context.options, microbatches=microbatches))


def _examples(program: Program) -> int:
    """What each device has of every batch; 1 where that is no whole number."""
    batches = [port.shape[0] for port in program.inputs if port.role is Role.BATCH and port.shape]
    held = [count // program.mesh.size for count in batches if count % program.mesh.size == 0]
    return math.gcd(*held) if held and len(held) == len(batches) else 1


def _divisors(program: Program) -> Iterator[int]:
    """Numbers of microbatches, each at least twice the one before."""
    examples, last = _examples(program), 0
    for count in range(1, examples + 1):
        if examples % count == 0 and count >= 2 * last:
            yield count
            last = count


def _dividing(counts: tuple[int, ...], program: Program) -> list[int]:
    examples = _examples(program)
    return sorted({count for count in counts if examples % count == 0})
