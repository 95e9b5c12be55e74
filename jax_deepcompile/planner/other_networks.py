"""What a plan is worth where the network is slower or faster than it is known to be."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.journal import Evaluated, Journal, Yardstick

_TIMES = (0.8, 1.25)
"""Of what collectives take here, what they take there."""

_MAY_LOSE = 0.005
"""The share of the step that a gain elsewhere may cost on this network."""


def other_networks(environment: Environment) -> tuple[Environment, ...]:
    """The same with slower and with faster collectives."""
    costs = (dataclasses.replace(environment.costs, collectives_take=times) for times in _TIMES)
    return tuple(environment.replace(costs=each) for each in costs)


def bounds_elsewhere(candidate: Candidate) -> bool:
    """Whether compute is the bound on one network, and communication on another."""
    compute_s, communication_s = candidate.prediction.compute_s, candidate.prediction.communication_s
    return min(_TIMES) * communication_s < compute_s < max(_TIMES) * communication_s


def best_on_average(
    environment: Environment,
    journal: Journal,
    name: str,
    now: Candidate,
    evaluated: Sequence[Evaluated],
    here: Yardstick,
    of: Candidate | None = None,
    least: Candidate | None = None,
) -> Candidate:
    """The best of ``now`` and what the strategy ``name`` had ``evaluated``, by the mean over networks.

    Args:
      here: seconds on this network.
      of: what was evaluated is a change of, if not of ``now``.
      least: no rival is much slower than this on this network; by default ``now``.
    """
    if not evaluated:
        return now
    most_s = (1 + _MAY_LOSE) * here.seconds(least or now)
    networks = other_networks(environment)

    def mean_s(candidate: Candidate) -> float:
        elsewhere = (candidate.simulated_by(each.costs) for each in networks)
        return statistics.mean(map(here.seconds, (candidate, *elsewhere)))

    def is_rival(each: Evaluated) -> bool:
        return each.candidate is not None and here.seconds(each.candidate) <= most_s

    compared = [now, of or now, *(each.candidate for each in evaluated if each.candidate)]
    means = {each.plan: mean_s(each) for each in compared}
    on_average = Yardstick(lambda each: means[each.plan], "on average of slower and faster networks")
    journal.best(name, now, [each for each in evaluated if not is_rival(each)], here, of)
    return journal.best(name, now, list(filter(is_rival, evaluated)), on_average, of)
