"""Where a program computes activations again, or keeps them from forward to backward, and what each choice takes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from jax_deepcompile._jax_compat import has_side_effects, open_jaxpr
from jax_deepcompile.analysis.kernels import between_products
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.names import value_names
from jax_deepcompile.analysis.recomputed import Activation, Place
from jax_deepcompile.analysis.residuals import Residual, residuals
from jax_deepcompile.analysis.segments import Tape
from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import renamed, unguarded
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.planner.state_on_host import LAYERS_IN_FLIGHT
from jax_deepcompile.transforms.keep_activations import activation_names
from jax_deepcompile.transforms.offload_values import offloadable


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
      residuals: what the first loop keeps for the second as it is; where no loop runs most layers, forward for
        backward.
      passes_s: where no loop runs layers, what forward and backward take.
      stays: names of what is not copied to the host: where no loop runs layers, what is read before it could be back.
      written: positions of the activations that the first loop writes into memory anyway.
      given_s: what a copy takes, on the device, of each residual that layers are given, by its name: on its way to the
        host it must not be what the next layer writes into.
    """

    loops: tuple[str, str]
    body: Any
    activations: tuple[Activation, ...]
    names: tuple[str, ...]
    seconds: tuple[float, ...]
    layers: int
    times: int
    copy_s: tuple[float, ...]
    residuals: tuple[Residual | Left, ...] = ()
    passes_s: tuple[float, float] = (0.0, 0.0)
    stays: frozenset[str] = frozenset()
    written: frozenset[int] = frozenset()
    given_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Of how many layers the device holds what is on the host."""
        return LAYERS_IN_FLIGHT if self.is_of_loops else 0

    @property
    def is_of_loops(self) -> bool:
        """Whether one loop computes what another one computed."""
        return self.loops[0] != self.loops[1]

    @property
    def shared_bytes(self) -> int:
        """What the first loop leaves for the second, or could, of all layers."""
        return self.layers * sum(each.size_bytes for each in (*self.residuals, *self.activations))

    def kept_bytes(self, positions: Collection[int]) -> int:
        """What the activations at ``positions`` take, of all layers."""
        return self.layers * sum(self.activations[position].size_bytes for position in positions)

    @cached_property
    def demand(self) -> Demand:
        """Who reads what in ``body``."""
        return Demand(self.body)

    def step_s(self, layer_s: float) -> float:
        """In a step what takes ``layer_s`` in every layer."""
        return self.layers * self.times * layer_s

    def staying(self) -> RecomputeRegion:
        """The same where nothing is copied to the host."""
        return replace(self, stays=frozenset({*self.names, *(each.name for each in self.residuals)}))

    def copying_s(self, position: int) -> float:
        """What it takes in a step to bring an activation from one loop to the other."""
        return self.step_s(self.copy_s[position]) if self.is_of_loops else 0.0

    def moving_s(self, name: str) -> float:
        """What kernels take more in a step where a residual is on the host."""
        return self.step_s(self.given_s.get(name, 0.0))


class Demand:
    """Who reads what in a jaxpr, barriers left out."""

    def __init__(self, body: Any) -> None:
        self._eqns = body.eqns
        guarded = unguarded(body)
        self._operands = [variables(renamed(atom, guarded) for atom in eqn.invars) for eqn in self._eqns]
        self._makers: dict[Any, int] = {}
        self._readers: dict[Any, list[int | None]] = defaultdict(list)
        for var in variables(renamed(atom, guarded) for atom in body.outvars):
            self._readers[var].append(None)
        for position, eqn in enumerate(self._eqns):
            if eqn.primitive.name != "optimization_barrier":
                self._makers |= dict.fromkeys(eqn.outvars, position)
                for var in self._operands[position]:
                    self._readers[var].append(position)

    def readers(self, var: Any) -> Sequence[int | None]:
        """Positions of the equations that read ``var``; None where it is a result of the body."""
        return self._readers.get(var, ())

    def freed(self, given: Collection) -> list[int]:
        """Positions of the equations that nobody needs where the variables ``given`` are at hand."""
        at_hand, freed, waiting = set(given), set[int](), list(given)
        while waiting:
            position = self._makers.get(waiting.pop())
            if position is None or position in freed or has_side_effects(self._eqns[position]):
                continue
            made = [var for var in self._eqns[position].outvars if var not in at_hand]
            if all(reader in freed for var in made for reader in self.readers(var)):
                freed.add(position)
                waiting += self._operands[position]
        return sorted(freed)


def find_recomputation(program: Program, costs: CostModel) -> list[RecomputeRegion]:
    """Where activations are computed again: pairs of loops in the same place, and what is in no such pair by itself."""
    named = (loop for loop in find_loops(program) if loop.path in program.loop_names)
    loops = sorted((loop for loop in named if loop.length), key=lambda loop: loop.path)
    times = {(): 1} | {loop.path: math.prod(_lengths(loop, loops)) for loop in loops}
    jaxprs = {(): program.jaxpr} | {loop.path: loop.scan.closed for loop in loops}
    places = {path: Place(jaxpr) for path, jaxpr in jaxprs.items()}
    regions: list[RecomputeRegion] = []
    taken: set[str] = set()
    stacks: set[Any] = set()

    def add(
        loops: tuple[str, str],
        first: Any,
        body: Any,
        activations: tuple[Activation, ...],
        layers: int,
        often: int,
        residuals: tuple[Residual | Left, ...] = (),
        tape: Tape | None = None,
    ) -> None:
        if activations or residuals:
            names = activation_names(first, activations, outside_of_loops=not loops[0])
            seconds = tuple(time.compute_s for time in equation_times(body, program.mesh, costs))
            copy_s = tuple(costs.memory_s(2 * activation.size_bytes) for activation in activations)
            passes_s, stays = (0.0, 0.0), frozenset[str]()
            if tape is not None:
                backward_s = sum(seconds[place] for place in tape.readers)
                passes_s = sum(seconds) - backward_s, backward_s
                known = value_names(body, phased=not loops[0])
                stays = _read_soon(tape, activations, known, seconds, costs) if residuals else stays
            found = RecomputeRegion(loops, body, activations, names, seconds, layers, often, copy_s)
            given = [each for each in residuals if isinstance(each, Residual) and each.is_given]
            given_s = {each.name: costs.memory_s(2 * each.size_bytes) for each in given}
            made = {each.first: place for place, each in enumerate(activations)}
            written = frozenset(made[each] for each in between_products(first, made))
            found = replace(found, residuals=residuals, passes_s=passes_s, stays=stays)
            regions.append(replace(found, written=written, given_s=given_s))
            taken.update(loops if activations else ())

    for forward, backward in _in_order(loops):
        if not taken & {forward.name, backward.name}:
            around = forward.path[:-1]
            shared = places[around].shared(forward.eqn, backward.eqn)
            names = forward.name, backward.name
            kept = residuals(jaxprs[around], forward, backward)
            add(names, shared.forward, shared.backward, shared.activations, forward.length, times[around], kept)
            stacks.update(Scan(forward.eqn).results.ys)
    of_loops = tuple(regions)
    for path, name in [((), ""), *((loop.path, loop.name) for loop in loops)]:
        if name not in taken:
            body, again = open_jaxpr(jaxprs[path]), places[path].repeated()
            tape = Tape(body)
            kept = _left(tape, {*stacks, *(each.first for each in again)}, phased=not name)
            outside_bytes = sum(each.size_bytes for each in (*kept, *again))
            if outside_bytes <= sum(each.shared_bytes for each in of_loops):
                kept = ()
            add((name, name), body, body, again, 1, times[path], kept, tape)
    return regions


@dataclass(frozen=True)
class Left:
    """What forward leaves for backward where no loop runs layers.

    Attributes:
      name: what plans call it.
      size_bytes: of the value.
    """

    name: str
    size_bytes: int


def _left(tape: Tape, others: Collection, phased: bool) -> tuple[Left, ...]:
    """Without ``others``: stacks of layer loops, and what is computed again."""
    known = offloadable(tape, phased)
    return tuple(Left(name, size_bytes(var)) for name, var in known.items() if var not in others)


def _read_soon(
    tape: Tape,
    activations: Sequence[Activation],
    names: Mapping[Any, str],
    seconds: Sequence[float],
    costs: CostModel,
) -> frozenset[str]:
    """Names of what backward reads, or computes again, too soon after forward made it."""
    eqns = tape.jaxpr.eqns
    makers = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
    first_reads: dict[Any, int] = {}
    for place in reversed(tape.readers):
        first_reads |= dict.fromkeys(tape.operands(place), place)
    until = [(var, first_reads[var]) for var in tape.left]
    until += [(each.first, makers[each.again[0]]) for each in activations]
    passed = [0.0, *accumulate(seconds)]

    def copied_s(size: int) -> float:
        return sum(costs.copy(size, way).seconds for way in (Direction.TO_HOST, Direction.FROM_HOST))

    return frozenset(
        names[var] for var, place in until if passed[place] - passed[makers[var]] < copied_s(size_bytes(var))
    )


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
