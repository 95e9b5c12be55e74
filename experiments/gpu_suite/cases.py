"""Working through the cases of a section: until its time is over, and past those that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Row = dict[str, Any]
"""One result: what JSON can hold, by name; units in the names."""

T = TypeVar("T")


class OutOfTimeError(Exception):
    """A section's time was over before its work was done."""


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock, ``end_s``."""

    end_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Never negative."""
        return max(0.0, self.end_s - time.monotonic())


def until(deadline: Deadline, cases: Sequence[T]) -> Iterator[T]:
    """The cases, while there is time.

    Raises:
      OutOfTimeError: the next case comes after the deadline; says how many are left.
    """
    for index, case in enumerate(cases):
        if not deadline.left_s:
            raise OutOfTimeError(f"out of time: {len(cases) - index} of {len(cases)} cases were not reached")
        yield case


def attempted(case: Row, measure: Callable[[], Row]) -> Row:
    """``case`` with what ``measure`` says of it, or with the text of its error."""
    try:
        return case | measure()
    except Exception as error:
        return case | {"error": error_text(error)}


def error_text(error: BaseException, limit: int = 600) -> str:
    """The class and the beginning of the message."""
    return f"{type(error).__name__}: {str(error).strip()[:limit]}"
