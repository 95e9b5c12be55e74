"""Which strategies propose, and which kinds of decisions are left out: what users say by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from jax_deepcompile import errors
from jax_deepcompile.planner.strategies import ON_A_HOST, STRATEGIES
from jax_deepcompile.planner.strategy import Strategy
from jax_deepcompile.transforms import TRANSFORMS
from jax_deepcompile.transforms.decision import Decision, nearest

Passes = Sequence[Strategy] | str | None
"""Strategies in the order they propose; ``"-unshard, -prefetch"`` for all but those; None for all."""

VARIABLE = "DEEPCOMPILE_DISABLE"
"""The environment variable that leaves out more by name: ``unshard,narrow_stacks``."""


@dataclass(frozen=True)
class Selection:
    """What planning may do.

    Attributes:
      strategies: to ask, in order; None for all that suit the program.
      disabled: names of strategies that do not propose, and kinds of decisions that no plan has.
    """

    strategies: tuple[Strategy, ...] | None
    disabled: frozenset[str]

    @classmethod
    def of(cls, passes: Passes) -> Selection:
        """What ``shard(passes=...)`` and the environment say.

        Raises:
          UnknownPassError: a name is nobody's.
        """
        named = passes.split(",") if isinstance(passes, str) else []
        strategies = None if passes is None or isinstance(passes, str) else tuple(passes)
        disabled = [_known(name.strip().removeprefix("-"), "passes", strategies) for name in named]
        disabled += [_known(name.strip(), VARIABLE, strategies) for name in os.environ.get(VARIABLE, "").split(",")]
        return cls(strategies, frozenset(filter(None, disabled)))

    def among(self, suitable: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """The strategies to ask, where all that suit the program are ``suitable``."""
        chosen = suitable if self.strategies is None else self.strategies
        return tuple(each for each in chosen if each.name not in self.disabled)

    @property
    def kinds(self) -> tuple[type[Decision], ...]:
        """The kinds of decisions that plans may have: all of ours, and those that a strategy brings."""
        own = (kind for each in self.strategies or () for kind in getattr(each, "decisions", ()))
        return tuple(dict.fromkeys((*TRANSFORMS, *own)))


def _known(name: str, where: str, strategies: Sequence[Strategy] | None) -> str:
    names = [each.name for each in (*STRATEGIES, *ON_A_HOST, *(strategies or ()))] + [kind.kind for kind in TRANSFORMS]
    if name and name not in names:
        raise errors.UnknownPassError(where, name, nearest(name, dict.fromkeys(names)))
    return name
