"""Memory as planning spends it: what is left, what of many things it is spent on, and what to do if it falls short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Protocol, TypeVar

from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal


class Sized(Protocol):
    """What memory can be spent on."""

    @property
    def size_bytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def free_bytes(best: Candidate, environment: Environment) -> int:
    """What ``best`` leaves of the limit, at its peak; there has to be one."""
    assert environment.limit_bytes is not None
    return environment.limit_bytes - best.prediction.peak_bytes


def with_less(environment: Environment, taken_bytes: int) -> Environment:
    """``environment`` without memory that something else takes."""
    limit = environment.limit_bytes
    return environment if limit is None else environment.replace(limit_bytes=limit - taken_bytes)


BUFFER_OVERHEAD = 1.25
"""How much of memory what is kept may take for each of its bytes: buffers lie less well."""

SLIGHTLY_LESS = 0.95
"""Of what does not fit, the share that is tried next."""

UNFORESEEN = 0.03
"""The share of memory by which a program may need more than the liveness of its values tells."""


def ladder(proposals: Iterable[Proposal]) -> tuple[Proposal, ...]:
    """``proposals``, the most modest first, as one: the last is evaluated first, those before it while none fits.

    None of them makes none.
    """
    step = None
    for each in proposals:
        if step is None or each.plan != step.plan:
            step = Proposal(each.plan, each.decision, otherwise=step)
    return () if step is None else (step,)


def total_bytes(items: Iterable[Sized]) -> int:
    return sum(item.size_bytes for item in items)


def most_worth(items: Iterable[S], worth: Callable[[S], float], free: float) -> tuple[S, ...]:
    """Those worth anything, in order of worth, as many as ``free`` bytes hold together."""
    return first_fitting(sorted((item for item in items if worth(item) > 0), key=lambda item: -worth(item)), free)


def first_fitting(items: Iterable[S], free: float) -> tuple[S, ...]:
    """In their order, every one that ``free`` bytes hold beside those before it."""
    chosen = []
    for item in items:
        if item.size_bytes <= free:
            free -= item.size_bytes
            chosen.append(item)
    return tuple(chosen)


def most_bytes(items: Sequence[S], free: int) -> list[S]:
    """The items that together come closest to ``free`` bytes from below. Among many, the largest that fit."""
    if len(items) > _TRY_ALL:
        return list(most_worth(items, lambda item: item.size_bytes, free))
    fitting = (some for some in _subsets(items) if total_bytes(some) <= free)
    return max(fitting, key=total_bytes, default=[])


def enough_bytes(items: Sequence[S], wanted: int) -> list[S]:
    """The items that together come closest to ``wanted`` bytes from above. Among many, the largest until enough."""
    if len(items) > _TRY_ALL:
        chosen: list[S] = []
        for item in sorted(items, key=lambda item: -item.size_bytes):
            if total_bytes(chosen) < wanted:
                chosen.append(item)
        return chosen
    enough = (some for some in _subsets(items) if total_bytes(some) >= wanted)
    return min(enough, key=total_bytes, default=list(items))


def _subsets(items: Sequence[S]) -> Iterator[list[S]]:
    return (list(some) for count in range(len(items) + 1) for some in combinations(items, count))


_TRY_ALL = 14
"""Up to this many items all combinations are looked at."""
