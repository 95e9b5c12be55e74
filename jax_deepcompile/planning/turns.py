"""Where backward loops compute again what forward loops did, and what keeping some of it would save."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import has_side_effects, open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.recomputed import Activation
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.program import Program
from jax_deepcompile.passes.keep_activations import shared_activations


@dataclass(frozen=True)
class Turn:
    """Two loops over the same layers, of which the second computes again what the first did.

    Attributes:
      loops: the names of the first and the second.
      body: of the second.
      activations: what both compute.
      seconds: what each equation of ``body`` takes.
      layers: how long the loops are.
      times: how often they run in a step.
      copy_s: seconds that copying so many bytes takes.
    """

    loops: tuple[str, str]
    body: Any
    activations: tuple[Activation, ...]
    seconds: tuple[float, ...]
    layers: int
    times: int
    copy_s: Callable[[int], float]

    def kept_bytes(self, positions: Collection[int]) -> int:
        """Of the stacks of the activations at ``positions``."""
        return self.layers * sum(self.activations[position].size_bytes for position in positions)

    def step_s(self, positions: Collection[int]) -> float:
        """What the second loop takes in a step if it is given those, and what handing them over takes."""
        given = {self.activations[position].again for position in positions}
        wanted = set(variables(self.body.outvars)) - given
        layer_s = sum(self.copy_s(self.activations[position].size_bytes) for position in positions)
        for eqn, seconds in zip(reversed(self.body.eqns), reversed(self.seconds), strict=True):
            if has_side_effects(eqn) or not wanted.isdisjoint(eqn.outvars):
                layer_s += seconds
                wanted.update(set(variables(eqn.invars)) - given)
        return self.layers * self.times * layer_s


def find_turns(program: Program, costs: CostModel) -> list[Turn]:
    """The pairs of loops in the same place with something that both compute, each loop in one of them."""
    loops = sorted(find_loops(program.jaxpr), key=lambda loop: loop.path)
    lengths = {loop.path: loop.length for loop in loops}
    turns: list[Turn] = []
    taken: set[str] = set()
    for forward, backward in _in_order(loops):
        if taken & {forward.name, backward.name}:
            continue
        activations = shared_activations(program, forward, backward)
        if not activations:
            continue
        body = open_jaxpr(backward.eqn.params["jaxpr"])
        times = equation_times(body, program.mesh, costs)
        around = (lengths[forward.path[:depth]] for depth in range(1, len(forward.path)))
        turns.append(
            Turn(
                (forward.name, backward.name),
                body,
                activations,
                tuple(time.compute_s for time in times),
                forward.length,
                math.prod(around),
                lambda size: costs.memory_s(2 * size),
            )
        )
        taken |= {forward.name, backward.name}
    return turns


def _in_order(loops: Sequence[Loop]) -> Iterator[tuple[Loop, Loop]]:
    """Pairs of as long loops in the same place, the nearest first."""
    for forward in reversed(loops):
        for backward in loops:
            same = backward.path[:-1] == forward.path[:-1] and backward.length == forward.length
            if same and backward.path > forward.path:
                yield forward, backward
