"""Cases of tests that have many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings


def in_turn(cases: Mapping[str, tuple], ways: Mapping[str, Any]) -> list[Any]:
    """Each of ``cases`` in each of ``ways``: what is not slow has every case in one way, and every way.

    Args:
      cases: arguments by what they are called.
      ways: the argument that follows them.
    """
    return [
        pytest.param(*case, way, id=f"{name}-{how}", marks=() if place % len(ways) == turn else pytest.mark.slow)
        for place, (name, case) in enumerate(cases.items())
        for turn, (how, way) in enumerate(ways.items())
    ]


def but_slow(cases: Iterable[str], slow: Sequence[str]) -> list[Any]:
    """``cases``, some of which are ``slow`` and say little that the others do not."""
    return [pytest.param(each, marks=pytest.mark.slow) if each in slow else each for each in cases]


def examples(count: int) -> settings:
    """The same examples in every run, so that a failure is the code's doing: ``count`` with ``--all``, else half."""
    share = settings.default.max_examples / settings.get_profile("default").max_examples
    return settings(
        max_examples=math.ceil(share * count),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
