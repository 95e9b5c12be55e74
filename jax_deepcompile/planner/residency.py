"""Where each activation is between forward and backward: kept on the device, copied to the host, or computed again.

One linear program decides of all of them together, 0 or 1 for each place an activation may have. What is computed again
follows: an equation runs if something that runs reads what it makes, and that is at hand nowhere. What is minimised is
the time of layer loops, forward and backward, each as long as the busiest of compute, network and copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from jax_deepcompile.ir.primitives import PRODUCTS
from jax_deepcompile.planner.linear_program import LinearProgram, Terms, times, total
from jax_deepcompile.planner.phases import Phases
from jax_deepcompile.planner.places import NOWHERE, Places, gained_s, saved_s
from jax_deepcompile.planner.recomputation import RecomputeRegion
from jax_deepcompile.planner.stacks import Stack
from jax_deepcompile.planner.state_on_host import COPIED_BYTES, HostLeaf


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
    program = LinearProgram()
    found = [_Region(program, region, host_bytes > 0, worth) for region in regions]
    gathered = {program.variable(_LEAST * each.size_bytes / phases.bytes_per_s): each for each in stacks}
    sizes = {var: float(each.size_bytes) for var, each in gathered.items()}
    leaves = _Leaves(program, state if host_bytes > 0 else {}, phases)
    before_s = phases.backward_s + sum(saved_s(region, already) for region in regions if region.is_of_loops)
    forward_s, backward_s = _passes(program, found, sizes, leaves, phases, before_s)
    leaves.hold(state_bytes)
    on_device = total([*(each.on_device for each in found), sizes, times(leaves.freed, -1.0)])
    on_host = total([*(each.on_host for each in found), leaves.sizes])
    if device_bytes is None:
        program.rather(times(on_device, 1 / _GIB))
    else:
        program.at_least(times(on_device, -1 / _GIB), -device_bytes / _GIB)
    program.at_least(times(on_host, -1 / _GIB), -host_bytes / _GIB)
    values = program.solved()
    if values is None:
        return None
    away = leaves.away(values)
    now_s = phases.forward_s + max(phases.backward_s, _HIDES * phases.network_s)
    gained = now_s - values[forward_s] - values[backward_s]
    gained += sum(each.gained_s(values) - gained_s(each.region, already) for each in found)
    before, after = (
        [leaf.size_bytes for name in names if (leaf := state.get(name)) and not leaf.in_loop]
        for names in (already.state, away)
    )
    gained += phases.update_s(before) - phases.update_s(after)
    kept = {each.region.loops: positions for each in found if (positions := each.at_hand(values))}
    offloaded = {each.region.loops: names for each in found if (names := each.away(values))}
    taken = tuple(each for var, each in gathered.items() if values[var])
    device, host = (int(sum(size * values[var] for var, size in each.items())) for each in (on_device, on_host))
    return Choice(Places(kept, offloaded, away), taken, device, host, gained)


def _passes(
    program: LinearProgram, found: Sequence[_Region], gathered: Terms, leaves: _Leaves, phases: Phases, before_s: float
) -> tuple[int, int]:
    """Variables for the seconds of forward and backward loops: of their kernels, network and copies each.

    Args:
      gathered: bytes that stay gathered.
      before_s: kernels of backward with nothing at hand.
    """
    loops = [each for each in found if each.region.is_of_loops]
    copied = total(each.copied for each in loops)
    there, back = _HIDDEN * phases.to_host_bytes_per_s, _HIDDEN * phases.from_host_bytes_per_s
    forward_s, backward_s = program.variable(1.0, upper=math.inf), program.variable(1.0, upper=math.inf)
    program.at_least({forward_s: 1.0}, phases.forward_s)
    program.at_least({backward_s: 1.0, **total(each.spared_s for each in loops)}, before_s)
    less_s = times(gathered, _HIDES / phases.bytes_per_s)
    program.at_least({backward_s: 1.0, **less_s}, _HIDES * phases.network_s)
    for each in found:
        if each.copied and not each.region.is_of_loops:
            each.wait(program, there, back)
    program.at_least({forward_s: 1.0, **times(copied, -1 / there)}, 0.0)
    program.at_least({forward_s: 1.0, **times(leaves.read, -1 / back)}, 0.0)
    updated = times(leaves.in_loops, back / phases.both_ways_bytes_per_s)
    program.at_least({backward_s: 1.0, **times(total([copied, leaves.read, updated]), -1 / back)}, 0.0)
    return forward_s, backward_s


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


class _Leaves:
    """The variables of the state's leaves: whether each is on the host between steps."""

    def __init__(self, program: LinearProgram, state: Mapping[str, HostLeaf], phases: Phases) -> None:
        rate = phases.both_ways_bytes_per_s
        self._program = program
        self._leaves = {
            program.variable((_LEAST if leaf.in_loop else 1.0) * leaf.size_bytes / rate): (name, leaf)
            for name, leaf in state.items()
        }
        alone_s = program.variable(1.0, upper=math.inf)
        for var, (_, leaf) in self._leaves.items():
            if not leaf.in_loop:
                program.at_least({alone_s: 1.0, var: -leaf.size_bytes * phases.alone_s_per_byte}, 0.0)

    @property
    def sizes(self) -> Terms:
        """Bytes."""
        return {var: float(leaf.size_bytes) for var, (_, leaf) in self._leaves.items()}

    @property
    def freed(self) -> Terms:
        """Bytes on the device."""
        return {var: float(leaf.freed_bytes) for var, (_, leaf) in self._leaves.items()}

    @property
    def read(self) -> Terms:
        """Bytes that forward reads, and as many backward."""
        return {var: leaf.reads / 2 * leaf.size_bytes for var, (_, leaf) in self._leaves.items() if leaf.reads}

    @property
    def in_loops(self) -> Terms:
        """Bytes that backward loops update."""
        return {var: float(leaf.size_bytes) for var, (_, leaf) in self._leaves.items() if leaf.in_loop}

    def hold(self, least_bytes: int) -> None:
        """So many bytes of those that loops update are on the host, if there are as many."""
        in_loops = self.in_loops
        self._program.at_least(times(in_loops, 1 / _GIB), min(least_bytes, sum(in_loops.values())) / _GIB)

    def away(self, values: np.ndarray) -> tuple[str, ...]:
        """Names of what is on the host."""
        return tuple(name for var, (name, _) in self._leaves.items() if values[var])


class _Region:
    """The variables of one region.

    Attributes:
      keep, send: for the position of each activation, whether it stays on the device, whether it is on the host.
      move: for the place of each residual that may go to the host, whether it does.
      spare: for the position of each equation that need not run, whether it does not.
      waits: what passes that no loop runs wait for copies.
    """

    waits: tuple[int, ...] = ()

    def __init__(self, program: LinearProgram, region: RecomputeRegion, to_host: bool, worth: float) -> None:
        self.region, self.keep, self.send, self.move = region, dict[int, int](), dict[int, int](), dict[int, int]()
        can_move = to_host and (region.is_of_loops or bool(region.residuals))
        there: dict = {}
        for place, (activation, factor) in enumerate(zip(region.activations, _worths(region, worth), strict=True)):
            cost = factor * region.step_s(region.copy_s[place])
            self.keep[place] = program.variable(cost)
            if can_move and activation.size_bytes >= COPIED_BYTES and region.names[place] not in region.stays:
                self.send[place] = program.variable(cost + self._least_s(activation.size_bytes))
                program.at_least({self.keep[place]: -1.0, self.send[place]: -1.0}, -1.0)
            terms = {each[place]: 1.0 for each in (self.keep, self.send) if place in each}
            there |= dict.fromkeys(activation.again, terms)
        for place, residual in enumerate(region.residuals):
            if can_move and residual.size_bytes >= COPIED_BYTES and residual.name not in region.stays:
                cost = region.moving_s(residual.name) + self._least_s(residual.size_bytes)
                self.move[place] = program.variable(cost)
        demand = region.demand
        self.spare = {
            each: program.variable(0.0 if region.is_of_loops else -region.step_s(region.seconds[each]))
            for each in demand.freed(list(there))
        }
        for each, spared in self.spare.items():
            for made in region.body.eqns[each].outvars:
                for reader in demand.readers(made):
                    program.at_least({spared: -1.0, **there.get(made, {}), **self._spared(reader)}, 0.0)

    def _spared(self, reader: int | None) -> Terms:
        return {self.spare[reader]: 1.0} if reader in self.spare else {}

    def _least_s(self, size_bytes: int) -> float:
        return _LEAST * self.region.step_s(size_bytes / _GIB)

    def wait(self, program: LinearProgram, there: float, back: float) -> None:
        """Adds what copies take longer than the passes they run beside, where no loop runs layers.

        Args:
          there, back: bytes a second each way.
        """
        forward_s, backward_s = (self.region.step_s(seconds) for seconds in self.region.passes_s)
        self.waits = out, home = program.variable(1.0, math.inf), program.variable(1.0, math.inf)
        program.at_least({out: 1.0, **times(self.copied, -1 / there)}, -forward_s)
        program.at_least({home: 1.0, **times(self.copied, -1 / back), **times(self.spared_s, -1.0)}, -backward_s)

    @property
    def spared_s(self) -> Terms:
        """Seconds of a step."""
        return {var: self.region.step_s(self.region.seconds[each]) for each, var in self.spare.items()}

    @property
    def copied(self) -> Terms:
        """Bytes of a step that go to the host, and come back."""
        return times(self.on_host, self.region.times)

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
        """As ``places.gained_s``, of this solution."""
        copied_s = sum(self.region.copying_s(place) for place, var in self.keep.items() if values[var])
        copied_s += sum(map(self.region.moving_s, self.away(values)))
        spared_s = 0.0 if self.region.is_of_loops else sum(each * values[var] for var, each in self.spared_s.items())
        return spared_s - copied_s - sum(values[var] for var in self.waits)
