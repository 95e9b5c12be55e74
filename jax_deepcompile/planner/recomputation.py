"""Where a program computes activations again, and what keeping some of them would save."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_deepcompile._jax_compat import has_side_effects, open_jaxpr
from jax_deepcompile.analysis.dataflow import renamed, unguarded, variables
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.recomputed import Activation, Place
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.program import Program
from jax_deepcompile.transforms.keep_activations import activation_names


@dataclass(frozen=True)
class RecomputeRegion:
    """A piece of a program that computes again what was computed before: in an earlier loop over the same layers, or in
    the piece itself.

    Attributes:
      loops: the names of the loop that computes first and of the one that the piece is the body of, as a plan has them.
      body: of the second.
      activations: what both compute.
      names: what plans call them.
      seconds: what each equation of ``body`` takes.
      layers: how many of each activation there are; as long as the two loops.
      times: how often all that happens in a step.
      copy_s: what copying each activation takes.
    """

    loops: tuple[str, str]
    body: Any
    activations: tuple[Activation, ...]
    names: tuple[str, ...]
    seconds: tuple[float, ...]
    layers: int
    times: int
    copy_s: tuple[float, ...]

    @property
    def is_of_loops(self) -> bool:
        """Whether one loop computes what another one computed."""
        return self.loops[0] != self.loops[1]

    def kept_bytes(self, positions: Collection[int]) -> int:
        """What the activations at ``positions`` take, of all layers."""
        return self.layers * sum(self.activations[position].size_bytes for position in positions)

    def step_s(self, layer_s: float) -> float:
        """In a step what takes ``layer_s`` in every layer."""
        return self.layers * self.times * layer_s

    def copying_s(self, position: int) -> float:
        """What it takes in a step to bring an activation from one loop to the other."""
        return self.step_s(self.copy_s[position]) if self.is_of_loops else 0.0


@dataclass
class Demand:
    """What is still computed of a region as more and more of its activations are given.

    Attributes:
      operands: what each equation reads, barriers left out.
      makers: for each variable the position of its equation.
      needless: positions of the equations that nobody needs.
    """

    region: RecomputeRegion
    operands: list[list] = field(init=False)
    uses: Counter = field(init=False, default_factory=Counter)
    makers: dict[Any, int] = field(init=False, default_factory=dict)
    given: set = field(init=False, default_factory=set)
    needless: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        body = self.region.body
        guarded = unguarded(body)
        self.operands = [variables(renamed(atom, guarded) for atom in eqn.invars) for eqn in body.eqns]
        self.uses.update(variables(renamed(atom, guarded) for atom in body.outvars))
        for position, eqn in enumerate(body.eqns):
            if eqn.primitive.name != "optimization_barrier":
                self.makers |= dict.fromkeys(eqn.outvars, position)
                self.uses.update(self.operands[position])

    def saved_s(self, position: int) -> float:
        """What a step takes less if the activation at ``position`` is given too, its copy aside."""
        freed, _ = self._freed(self.region.activations[position].again)
        return self.region.step_s(sum(self.region.seconds[each] for each in freed))

    def gained_s(self, position: int) -> float:
        """``saved_s`` without what the copy takes."""
        return self.saved_s(position) - self.region.copying_s(position)

    def is_worthwhile(self, position: int) -> bool:
        """Whether computing the activation again takes clearly longer than bringing it from memory.

        Cheap work is not counted as well as all that: most of it XLA does beside other work.
        """
        return self.saved_s(position) > 3 * self.region.step_s(self.region.copy_s[position])

    def give(self, position: int) -> None:
        """Gives the activation at ``position``."""
        again = self.region.activations[position].again
        freed, less = self._freed(again)
        self.uses.subtract(less)
        self.given.update(again)
        self.needless.update(freed)

    def reads(self, position: int) -> bool:
        """Whether the activation at ``position`` is of use beside all that was given."""
        return any(self.uses[var] > 0 for var in self.region.activations[position].again)

    def _freed(self, variables: Collection) -> tuple[list[int], Counter]:
        """The equations that nobody needs once ``variables`` are given, and how much less often each one is read."""
        eqns, freed, less = self.region.body.eqns, list[int](), Counter()
        given = self.given | set(variables)
        waiting = [var for var in variables if var not in self.given]
        while waiting:
            position = self.makers.get(waiting.pop())
            if position is None or position in self.needless or position in freed or has_side_effects(eqns[position]):
                continue
            if any(self.uses[made] > less[made] for made in eqns[position].outvars if made not in given):
                continue
            freed.append(position)
            less.update(self.operands[position])
            waiting += [read for read in self.operands[position] if self.uses[read] <= less[read]]
        return freed, less


def find_recomputation(program: Program, costs: CostModel) -> list[RecomputeRegion]:
    """Where activations are computed again: pairs of loops in the same place, and what is in no such pair by itself."""
    loops = sorted((loop for loop in find_loops(program) if loop.length), key=lambda loop: loop.path)
    times = {(): 1} | {loop.path: math.prod(_lengths(loop, loops)) for loop in loops}
    jaxprs = {(): program.jaxpr} | {loop.path: loop.scan.closed for loop in loops}
    places = {path: Place(jaxpr) for path, jaxpr in jaxprs.items()}
    regions: list[RecomputeRegion] = []
    taken: set[str] = set()

    def add(
        loops: tuple[str, str], first: Any, body: Any, activations: tuple[Activation, ...], layers: int, often: int
    ) -> None:
        if activations:
            names = activation_names(first, activations, outside_of_loops=not loops[0])
            seconds = tuple(time.compute_s for time in equation_times(body, program.mesh, costs))
            copy_s = tuple(costs.memory_s(2 * activation.size_bytes) for activation in activations)
            regions.append(RecomputeRegion(loops, body, activations, names, seconds, layers, often, copy_s))
            taken.update(loops)

    for forward, backward in _in_order(loops):
        if not taken & {forward.name, backward.name}:
            around = forward.path[:-1]
            shared = places[around].shared(forward.eqn, backward.eqn)
            names = forward.name, backward.name
            add(names, shared.forward, shared.backward, shared.activations, forward.length, times[around])
    for path, name in [((), ""), *((loop.path, loop.name) for loop in loops)]:
        if name not in taken:
            body = open_jaxpr(jaxprs[path])
            add((name, name), body, body, places[path].repeated(), 1, times[path])
    return regions


def _lengths(loop: Loop, loops: Sequence[Loop]) -> Iterator[int]:
    """Of ``loop`` and of those around it."""
    return (other.length for other in loops if loop.path[: len(other.path)] == other.path)


def _in_order(loops: Sequence[Loop]) -> Iterator[tuple[Loop, Loop]]:
    """Pairs of as long loops in the same place, the nearest first."""
    for forward in reversed(loops):
        for backward in loops:
            same = backward.path[:-1] == forward.path[:-1] and backward.length == forward.length
            if same and backward.path > forward.path:
                yield forward, backward
