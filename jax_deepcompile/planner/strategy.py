"""What proposes changes to a plan. Strategies look and propose; the search compiles, simulates, accepts or rejects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.plan import Plan


class Stage(StrEnum):
    """When a strategy proposes."""

    OPENING = "opening"
    """First, beside the plan that all begins with; it sees ``best.plan`` and ``best.program``, not evaluated yet."""
    MAIN = "main"
    """In turn, each on top of what was accepted before."""
    CLOSING = "closing"
    """Last, when all else is decided; what it proposes is scheduled by the cost model before it is compared."""


@dataclass(frozen=True)
class Proposal:
    """A plan that may be better.

    Attributes:
      plan: the decisions.
      decision: what it changes, in words.
      otherwise: a more modest proposal, evaluated if this one does not fit.
    """

    plan: Plan
    decision: str
    otherwise: Proposal | None = None


@runtime_checkable
class Strategy(Protocol):
    """Proposes changes to a plan; all of them legal, none of them compiled."""

    @property
    def name(self) -> str: ...

    @property
    def stage(self) -> Stage: ...

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterable[Proposal]:
        """Plans that may be better than ``best.plan``, the most promising first.

        Args:
          base: the fully sharded program that plans are carried out on.
          best: the best so far.
          environment: what it is for.
        """
        ...
