"""Where each activation is between forward and backward: kept on the device, copied to the host, or computed again.

One linear program decides of all of them together, 0 or 1 for each place an activation may have. What is computed again
follows: an equation runs if something that runs reads what it makes, and that is at hand nowhere. What is minimised is
the time of layer loops, forward and backward, each as long as the busiest of compute, network and copies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.simulation import Totals
from jax_deepcompile.costs.streams import Part
from jax_deepcompile.ir.primitives import PRODUCTS
from jax_deepcompile.planner.candidate import Candidate
from jax_deepcompile.planner.recomputation import RecomputeRegion
from jax_deepcompile.planner.stacks import Stack
from jax_deepcompile.planner.state_on_host import COPIED_BYTES, HostLeaf
from jax_deepcompile.runtime.quiet import STDOUT, silenced

Loops = tuple[str, str]
"""The names of a forward and a backward loop; equal where both are one place."""


@dataclass(frozen=True)
class Phases:
    """What layer loops take in a step.

    Attributes:
      forward_s: kernels of loops that reduce no gradients; where none does, a third of all but what is computed again.
      backward_s: kernels of all others.
      network_s: their collectives.
      bytes_per_s: that those gather and reduce.
      to_host_bytes_per_s, from_host_bytes_per_s: of copies; all GPUs of a node copy at the same time.
      both_ways_bytes_per_s: of copies in each direction while others go the other way.
    """

    forward_s: float
    backward_s: float
    network_s: float
    bytes_per_s: float
    to_host_bytes_per_s: float = math.inf
    from_host_bytes_per_s: float = math.inf
    both_ways_bytes_per_s: float = math.inf

    @classmethod
    def of(cls, best: Candidate, costs: CostModel) -> Phases:
        forward, backward = Totals(), Totals()
        for loop in best.simulation.loops:
            if loop.is_innermost and loop.trip.reduced_bytes:
                backward = backward.plus(loop.trip, loop.executions * loop.trip_count)
            elif loop.is_innermost:
                forward = forward.plus(loop.trip, loop.executions * loop.trip_count)
        forward_s, backward_s = forward.compute_s, backward.compute_s
        if not backward_s:
            forward_s = (forward.compute_s - forward.kernels_s.get(Part.AGAIN, 0.0)) * _FORWARD
            backward_s = forward.compute_s - forward_s
        moved = backward.gathered_bytes + backward.reduced_bytes
        copies = [costs.copy(_MANY_BYTES, direction) for direction in (Direction.TO_HOST, Direction.FROM_HOST)]
        rates = [_MANY_BYTES / copy.seconds for copy in copies]
        both_ways = min(rate / copy.both_ways for rate, copy in zip(rates, copies, strict=True))
        return cls(
            forward_s,
            backward_s,
            backward.communication_s,
            moved / max(backward.communication_s, 1e-12) if moved else math.inf,
            to_host_bytes_per_s=rates[0],
            from_host_bytes_per_s=rates[1],
            both_ways_bytes_per_s=both_ways,
        )

    @property
    def alone_s_per_byte(self) -> float:
        """What copies in and out again take longer than if others went the other way meanwhile."""
        there, back = 1 / self.to_host_bytes_per_s, 1 / self.from_host_bytes_per_s
        return max(there + back - 1 / self.both_ways_bytes_per_s, 0.0)

    def update_s(self, sizes: Collection[int]) -> float:
        """What leaves of those bytes wait for around their update: one comes in while the one before goes out.

        Nothing goes out while the first comes in, and nothing comes in while the last goes out: there are few bytes in
        flight if no leaf is large.
        """
        return sum(sizes) / self.both_ways_bytes_per_s + max(sizes, default=0) * self.alone_s_per_byte


_MANY_BYTES = 1 << 30

_FORWARD = 1 / 3
"""Of the kernels of layers: for each product of forward backward has two."""


@dataclass(frozen=True)
class Places:
    """What is where between forward and backward; all else is computed again, or stays as the step was written.

    Attributes:
      kept: positions of activations that are at hand for backward, on the device or on the host.
      offloaded: names of what is on the host, of those and of what the step keeps anyway.
      state: leaves of the state that are on the host, between steps.
    """

    kept: Mapping[Loops, tuple[int, ...]] = field(default_factory=dict)
    offloaded: Mapping[Loops, tuple[str, ...]] = field(default_factory=dict)
    state: tuple[str, ...] = ()


NOWHERE = Places()
"""Nothing is kept that the program as it was written does not keep, nor on the host."""


@dataclass(frozen=True)
class Choice:
    """A solution.

    Attributes:
      stacks: parameters that stay gathered from forward to backward.
      device_bytes, host_bytes: that it takes more than the program as it was written.
      gained_s: of a step, compared with what was chosen already.
    """

    places: Places
    stacks: tuple[Stack, ...]
    device_bytes: int
    host_bytes: int
    gained_s: float


WORTH = 3.0
"""How many times longer cheap work must take again than bringing from memory: most of it XLA does beside other."""


def choose(
    regions: Sequence[RecomputeRegion],
    stacks: Sequence[Stack],
    phases: Phases,
    device_bytes: float | None,
    host_bytes: float = 0.0,
    already: Places = NOWHERE,
    state: Mapping[str, HostLeaf] = MappingProxyType({}),
    state_bytes: int = 0,
    worth: float = WORTH,
) -> Choice | None:
    """The places that make a step fastest; None if nothing fits.

    Args:
      stacks: what may stay gathered.
      phases: of a step with what was chosen ``already``.
      device_bytes, host_bytes: that activations and stacks may take more than in the program as it was written; with
        None, as little as can be of the device.
      state: leaves that may be on the host between steps; nothing hides the copies of their update, unless that is in
        a backward loop.
      state_bytes: that so many of those that loops update are there, if there are as many.
      worth: how many times longer cheap work must take again than bringing its result from memory.
    """
    model = _Model()
    found = [_Region(model, region, host_bytes > 0, worth) for region in regions]
    loops = [each for each in found if each.region.is_of_loops]
    gathered = {model.variable(_LEAST * each.size_bytes / phases.bytes_per_s): each for each in stacks}
    sizes = {var: float(each.size_bytes) for var, each in gathered.items()}
    movable = state if host_bytes > 0 else {}
    rate = phases.both_ways_bytes_per_s
    leaves = {
        model.variable((_LEAST if leaf.in_loop else 1.0) * leaf.size_bytes / rate): (name, leaf)
        for name, leaf in movable.items()
    }
    alone_s = model.variable(1.0, upper=math.inf)
    for var, (_, leaf) in leaves.items():
        if not leaf.in_loop:
            model.at_least({alone_s: 1.0, var: -leaf.size_bytes * phases.alone_s_per_byte}, 0.0)
    moved = {var: float(leaf.size_bytes) for var, (_, leaf) in leaves.items()}
    freed = {var: float(leaf.freed_bytes) for var, (_, leaf) in leaves.items()}
    streamed = {var: leaf.reads / 2 * leaf.size_bytes for var, (_, leaf) in leaves.items() if leaf.reads}
    spared_s = _sum(each.spared_s for each in loops)
    before_s = phases.backward_s + sum(saved_s(region, already) for region in regions if region.is_of_loops)
    forward_s, backward_s = model.variable(1.0, upper=math.inf), model.variable(1.0, upper=math.inf)
    model.at_least({forward_s: 1.0}, phases.forward_s)
    model.at_least({backward_s: 1.0, **spared_s}, before_s)
    less_s = _times(sizes, _HIDES / phases.bytes_per_s)
    model.at_least({backward_s: 1.0, **less_s}, _HIDES * phases.network_s)
    on_host = _sum([*(each.on_host for each in found), moved])
    copied, there = _sum(each.copied for each in loops), _HIDDEN * phases.to_host_bytes_per_s
    back = _HIDDEN * phases.from_host_bytes_per_s
    for each in found:
        if each.copied and not each.region.is_of_loops:
            each.wait(model, there, back)
    model.at_least({forward_s: 1.0, **_times(copied, -1 / there)}, 0.0)
    model.at_least({forward_s: 1.0, **_times(streamed, -1 / back)}, 0.0)
    in_loops = {var: moved[var] for var, (_, leaf) in leaves.items() if leaf.in_loop}
    model.at_least(_times(in_loops, 1 / _GIB), min(state_bytes, sum(in_loops.values())) / _GIB)
    updated = {var: leaf.size_bytes * back / rate for var, (_, leaf) in leaves.items() if leaf.in_loop}
    model.at_least({backward_s: 1.0, **_times(_sum([copied, streamed, updated]), -1 / back)}, 0.0)
    on_device = _sum([*(each.on_device for each in found), sizes, _times(freed, -1.0)])
    if device_bytes is None:
        model.rather(_times(on_device, 1 / _GIB))
    else:
        model.at_least(_times(on_device, -1 / _GIB), -device_bytes / _GIB)
    model.at_least(_times(on_host, -1 / _GIB), -host_bytes / _GIB)
    values = model.solved()
    if values is None:
        return None
    now_s = phases.forward_s + max(phases.backward_s, _HIDES * phases.network_s)
    gained_s = now_s - values[forward_s] - values[backward_s]
    gained_s += sum(each.gained_s(values) - _gained_s(each.region, already) for each in found)
    away = tuple(name for var, (name, _) in leaves.items() if values[var])
    before, after = (
        [leaf.size_bytes for name in names if (leaf := state.get(name)) and not leaf.in_loop]
        for names in (already.state, away)
    )
    gained_s += phases.update_s(before) - phases.update_s(after)
    kept = {each.region.loops: positions for each in found if (positions := each.at_hand(values))}
    offloaded = {each.region.loops: names for each in found if (names := each.away(values))}
    taken = tuple(each for var, each in gathered.items() if values[var])
    device, host = (int(sum(size * values[var] for var, size in each.items())) for each in (on_device, on_host))
    return Choice(Places(kept, offloaded, away), taken, device, host, gained_s)


_HIDES = 0.9
"""The share of the network's time that compute may take in a loop for every schedule to hide it."""

_HIDDEN = 0.95
"""The share of a loop's time that copies may take to be hidden."""


def _worths(region: RecomputeRegion, worth: float) -> list[float]:
    """``worth`` of each activation: what spares a product spares a kernel, and may be written anyway."""
    products = {place for place, eqn in enumerate(region.body.eqns) if eqn.primitive.name in PRODUCTS}
    spared = (products.intersection(region.demand.freed(each.again)) for each in region.activations)
    return [1.0 if some and place in region.written else worth for place, some in enumerate(spared)]


_LEAST = 1e-3
"""What counts of what is hidden anyway, so that of choices that are equally fast the smaller one is made."""

_GIB = float(1 << 30)

Terms = Mapping[int, float]
"""Variables by number, and what each is multiplied by."""


def saved_s(region: RecomputeRegion, places: Places) -> float:
    """What a step computes less by what is at hand."""
    positions = places.kept.get(region.loops, ())
    freed = region.demand.freed([var for position in positions for var in region.activations[position].again])
    return region.step_s(sum(region.seconds[each] for each in freed))


def _gained_s(region: RecomputeRegion, already: Places) -> float:
    """What is gained ``already``, beside what loops compute less."""
    away = already.offloaded.get(region.loops, ())
    here = [each for each in already.kept.get(region.loops, ()) if region.names[each] not in away]
    copied_s = sum(region.copying_s(each) for each in here) + sum(map(region.moving_s, away))
    return (0.0 if region.is_of_loops else saved_s(region, already)) - copied_s


def taken_bytes(regions: Sequence[RecomputeRegion], places: Places, state: Mapping[str, HostLeaf]) -> int:
    """What ``places`` take on the device more than the program as it was written, of its ``state``."""
    taken = -sum(state[name].freed_bytes for name in places.state if name in state)
    for region in regions:
        away = places.offloaded.get(region.loops, ())
        for place in places.kept.get(region.loops, ()):
            layers = region.in_flight if region.names[place] in away else region.layers
            taken += layers * region.activations[place].size_bytes
        moved = sum(each.size_bytes for each in region.residuals if each.name in away)
        taken += (region.in_flight - region.layers) * moved
    return taken


class _Region:
    """The variables of one region.

    Attributes:
      keep, send: for the position of each activation, whether it stays on the device, whether it is on the host.
      move: for the place of each residual that may go to the host, whether it does.
      spare: for the position of each equation that need not run, whether it does not.
      waits: what passes that no loop runs wait for copies.
    """

    waits: tuple[int, ...] = ()

    def __init__(self, model: _Model, region: RecomputeRegion, to_host: bool, worth: float) -> None:
        self.region, self.keep, self.send, self.move = region, dict[int, int](), dict[int, int](), dict[int, int]()
        can_move = to_host and (region.is_of_loops or bool(region.residuals))
        there: dict = {}
        for place, (activation, factor) in enumerate(zip(region.activations, _worths(region, worth), strict=True)):
            cost = factor * region.step_s(region.copy_s[place])
            self.keep[place] = model.variable(cost)
            if can_move and activation.size_bytes >= COPIED_BYTES and region.names[place] not in region.stays:
                self.send[place] = model.variable(cost + self._least_s(activation.size_bytes))
                model.at_least({self.keep[place]: -1.0, self.send[place]: -1.0}, -1.0)
            terms = {each[place]: 1.0 for each in (self.keep, self.send) if place in each}
            there |= dict.fromkeys(activation.again, terms)
        for place, residual in enumerate(region.residuals):
            if can_move and residual.size_bytes >= COPIED_BYTES and residual.name not in region.stays:
                cost = region.moving_s(residual.name) + self._least_s(residual.size_bytes)
                self.move[place] = model.variable(cost)
        demand = region.demand
        self.spare = {
            each: model.variable(0.0 if region.is_of_loops else -region.step_s(region.seconds[each]))
            for each in demand.freed(list(there))
        }
        for each, spared in self.spare.items():
            for made in region.body.eqns[each].outvars:
                for reader in demand.readers(made):
                    model.at_least({spared: -1.0, **there.get(made, {}), **self._spared(reader)}, 0.0)

    def _spared(self, reader: int | None) -> Terms:
        return {self.spare[reader]: 1.0} if reader in self.spare else {}

    def _least_s(self, size_bytes: int) -> float:
        return _LEAST * self.region.step_s(size_bytes / _GIB)

    def wait(self, model: _Model, there: float, back: float) -> None:
        """Adds what copies take longer than the passes they run beside, where no loop runs layers.

        Args:
          there, back: bytes a second each way.
        """
        forward_s, backward_s = (self.region.step_s(seconds) for seconds in self.region.passes_s)
        self.waits = out, home = model.variable(1.0, math.inf), model.variable(1.0, math.inf)
        model.at_least({out: 1.0, **_times(self.copied, -1 / there)}, -forward_s)
        model.at_least({home: 1.0, **_times(self.copied, -1 / back), **_times(self.spared_s, -1.0)}, -backward_s)

    @property
    def spared_s(self) -> Terms:
        """Seconds of a step."""
        return {var: self.region.step_s(self.region.seconds[each]) for each, var in self.spare.items()}

    @property
    def copied(self) -> Terms:
        """Bytes of a step that go to the host, and come back."""
        return _times(self.on_host, self.region.times)

    @property
    def on_host(self) -> Terms:
        """Bytes."""
        sent = {var: self.region.kept_bytes([place]) for place, var in self.send.items()}
        return {**sent, **{var: self._all_layers(place) for place, var in self.move.items()}}

    @property
    def on_device(self) -> Terms:
        """Bytes, those that are left where they were not counted."""
        kept = {var: self.region.kept_bytes([place]) for place, var in self.keep.items()}
        sizes = self.region.activations
        sent = {var: self.region.in_flight * sizes[place].size_bytes for place, var in self.send.items()}
        few = {place: self.region.in_flight * self.region.residuals[place].size_bytes for place in self.move}
        moved = {var: few[place] - self._all_layers(place) for place, var in self.move.items()}
        return {**kept, **sent, **moved}

    def _all_layers(self, place: int) -> int:
        return self.region.layers * self.region.residuals[place].size_bytes

    def at_hand(self, values: np.ndarray) -> tuple[int, ...]:
        """Positions of the activations that are kept or sent."""
        chosen = {place for each in (self.keep, self.send) for place, var in each.items() if values[var]}
        return tuple(sorted(chosen))

    def away(self, values: np.ndarray) -> tuple[str, ...]:
        """Names of what is sent or moved."""
        sent = [self.region.names[place] for place, var in self.send.items() if values[var]]
        return (*(self.region.residuals[place].name for place, var in self.move.items() if values[var]), *sent)

    def gained_s(self, values: np.ndarray) -> float:
        """As ``_gained_s``."""
        copied_s = sum(self.region.copying_s(place) for place, var in self.keep.items() if values[var])
        copied_s += sum(map(self.region.moving_s, self.away(values)))
        spared_s = 0.0 if self.region.is_of_loops else sum(each * values[var] for var, each in self.spared_s.items())
        return spared_s - copied_s - sum(values[var] for var in self.waits)


def _times(terms: Terms, factor: float) -> Terms:
    return {var: factor * value for var, value in terms.items()}


def _sum(several: Iterable[Terms]) -> Terms:
    """Of terms of different variables."""
    return {var: value for terms in several for var, value in terms.items()}


class _Model:
    """A linear program: variables that are 0 or 1, or any number, and cost something."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self._uppers: list[float] = []
        self._wholes: list[bool] = []
        self._rows: list[tuple[Terms, float]] = []

    def variable(self, cost: float = 0.0, upper: float = 1.0) -> int:
        """The number of a new one: 0 or 1, or with another ``upper`` bound anything up to that."""
        self.costs.append(cost)
        self._uppers.append(upper)
        self._wholes.append(upper == 1.0)
        return len(self.costs) - 1

    def at_least(self, terms: Terms, least: float) -> None:
        """The sum of ``terms`` is no less than ``least``."""
        self._rows.append((terms, least))

    def rather(self, terms: Terms) -> None:
        """The sum of ``terms`` is what is made small, the costs so far only beside that."""
        self.costs = [_BESIDE * cost + terms.get(var, 0.0) for var, cost in enumerate(self.costs)]

    def solved(self) -> np.ndarray | None:
        """What each variable is where the sum of costs is smallest; None if there is no solution."""
        entries = [(row, var, value) for row, (terms, _) in enumerate(self._rows) for var, value in terms.items()]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self._rows), len(self.costs))
        least: Any = [low for _, low in self._rows]
        upper: Any = np.array(self._uppers)
        constraints = LinearConstraint(coo_array((values, (rows, columns)), shape).tocsr(), least)
        with silenced(STDOUT):  # HiGHS prints a line of its developers' now and then
            found = milp(
                np.array(self.costs),
                integrality=np.array(self._wholes, int),
                bounds=Bounds(0.0, upper),
                constraints=constraints,
                options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
            )
        return None if found.x is None else np.where(self._wholes, np.round(found.x), found.x)


_BESIDE = 1e-3
"""GiB that a second counts as where memory is what is made small."""

_SECONDS, _GAP = 20.0, 1e-4
"""What solving may take, and the share of the costs by which a solution may miss the best."""
