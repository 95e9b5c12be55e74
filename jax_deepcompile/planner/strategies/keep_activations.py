"""Which activations are kept for the backward pass: those that take longest to compute again for their bytes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_deepcompile.costs.simulation import Totals
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import keep_over_loops, layer_stacks
from jax_deepcompile.planner.recomputation import Demand, RecomputeRegion, find_recomputation
from jax_deepcompile.planner.stacks import Stack, every_layer, saved_stacks, saving
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.unshard import ReusedGathers


@dataclass(frozen=True)
class KeepActivations:
    """What a checkpointed layer computes again stays from the forward pass, as far as memory holds it and time gains.

    Once backward waits for the network, computing less does not make it faster: then parameters stay gathered, until it
    waits for compute again, and so on until memory is full.
    """

    name: str = "keep_activations"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or best.plan.of(Prefetch) or best.plan.of(ReusedGathers):
            return
        free_bytes = budget.free_bytes(best, environment)
        gathers = best.plan.program(base, environment.mesh, until=SavedGathers)
        regions = find_recomputation(gathers, environment.costs)
        stacks = saved_stacks(base, environment, best.plan, layer_stacks(gathers, best.plan)) if regions else []
        already = positions_of(best.plan.of(KeptActivations), regions)
        proposals = []
        for share in _SHARES:
            choice = choose(regions, stacks, already, share * free_bytes, Backward.of(best))
            plan = best.plan.having(KeptActivations, as_planned(choice.activations, regions))
            if choice.saved_s < WORTH_TRYING * best.prediction.step_s:
                continue
            if choice.stacks:
                plan = plan.having(SavedGathers, saving(choice.stacks))
            if plan.of(KeptGathers):
                plan = keep_over_loops(base, plan, environment)
            proposals.append(Proposal(plan, _decision(choice, regions)))
        if proposal := budget.ladder(proposals):
            yield proposal


def _decision(choice: Choice, regions: Sequence[RecomputeRegion]) -> str:
    size = sum(region.kept_bytes(choice.activations.get(region.loops, ())) for region in regions)
    count = sum(map(len, choice.activations.values()))
    whose = " of every layer" if any(first != second for first, second in choice.activations) else ""
    decision = f"{count} activations{whose} are kept, {size / 2**30:.2f} GiB"
    return f"{decision}; {every_layer(choice.stacks)}" if choice.stacks else decision


_SHARES = (0.6, 0.8, 0.92)
"""Of free memory: the most is proposed first, less if that does not fit. The rest is for schedules that hide more and
hold more meanwhile."""


Kept = dict[tuple[str, str], tuple[int, ...]]
"""For the names of two loops the positions of the activations that the second need not compute again."""


def as_planned(chosen: Kept, regions: Sequence[RecomputeRegion]) -> tuple[KeptActivations, ...]:
    """``chosen`` as a plan has it."""
    names = {region.loops: region.names for region in regions}
    return tuple(
        KeptActivations(*loops, tuple(names[loops][position] for position in positions))
        for loops, positions in chosen.items()
    )


def positions_of(kept: Sequence[KeptActivations], regions: Sequence[RecomputeRegion]) -> Kept:
    """What a plan says is ``kept``, by position."""
    names = {region.loops: region.names for region in regions}
    loops = {(each.forward, each.backward): each.values for each in kept}
    return {
        each: tuple(names[each].index(value) for value in values) for each, values in loops.items() if each in names
    }


@dataclass(frozen=True)
class Backward:
    """What the loops that reduce gradients take in a step.

    Attributes:
      compute_s: of kernels; infinite where no loop reduces any, and nothing but compute counts.
      network_s: of collectives.
      bytes_per_s: gathered and reduced.
    """

    compute_s: float
    network_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, best: Candidate) -> Backward:
        loops = [loop for loop in best.simulation.loops if loop.is_innermost and loop.trip.reduced_bytes]
        trips = Totals()
        for loop in loops:
            trips = trips.plus(loop.trip, loop.executions * loop.trip_count)
        moved = trips.gathered_bytes + trips.reduced_bytes
        return cls(
            trips.compute_s if loops else math.inf, trips.communication_s, moved / max(trips.communication_s, 1e-12)
        )


@dataclass(frozen=True)
class Choice:
    """What is kept for backward loops.

    Attributes:
      saved_s: computed less.
    """

    activations: Kept
    stacks: tuple[Stack, ...]
    saved_s: float


def choose(
    regions: Sequence[RecomputeRegion], stacks: Sequence[Stack], already: Kept, free_bytes: float, backward: Backward
) -> Choice:
    """What is kept: one after the other what saves most for its bytes of what backward waits for."""
    demands = {region.loops: Demand(region) for region in regions}
    chosen = {loops: set(already.get(loops, ())) for loops in demands}
    for loops, demand in demands.items():
        for position in chosen[loops]:
            demand.give(position)
    offers = _Offers([(each, place) for each in demands.values() for place in range(len(each.region.activations))])
    left, gathered = list(stacks), list[Stack]()
    compute_s, network_s, saved_s = backward.compute_s, backward.network_s, 0.0
    while True:
        fitting = [each for each in left if each.size_bytes <= free_bytes]
        largest = max(fitting, key=lambda stack: stack.size_bytes, default=None)
        if compute_s < _HIDES * network_s and largest is not None:
            left.remove(largest)
            gathered.append(largest)
            free_bytes -= largest.size_bytes
            network_s -= largest.size_bytes / backward.bytes_per_s
            continue
        offer = offers.best(free_bytes, in_loops=compute_s >= _HIDES * network_s)
        if offer is None:
            break
        demand, position = offer
        gained_s = demand.gained_s(position)
        free_bytes -= demand.region.kept_bytes([position])
        saved_s += gained_s
        compute_s -= gained_s if demand.region.is_of_loops else 0.0
        chosen[demand.region.loops].add(position)
        demand.give(position)
    needed = {
        loops: tuple(position for position in sorted(chosen[loops]) if demand.reads(position))
        for loops, demand in demands.items()
    }
    return Choice({loops: positions for loops, positions in needed.items() if positions}, tuple(gathered), saved_s)


_HIDES = 0.9
"""The share of the network's time that compute may take in a loop for every schedule to hide it."""


_Offer = tuple[Demand, int]
"""One more activation to keep: where it is, and its position among the activations there."""


class _Offers:
    """Activations to keep, what saves most for its bytes first.

    What one saves changes with what was taken before. Those that were best are looked at again before they are taken,
    all others once none of those is worthwhile any more.
    """

    def __init__(self, offers: Sequence[_Offer]) -> None:
        self._left = dict(enumerate(offers))
        self._heap: list[tuple[float, int]] = []

    def best(self, free_bytes: float, in_loops: bool) -> _Offer | None:
        """The best of what fits, which is offered no more; None if nothing is worthwhile.

        Args:
          in_loops: whether what loops compute again counts; once it does not, it never does again.
        """
        if not in_loops:
            self._left = {place: offer for place, offer in self._left.items() if not offer[0].region.is_of_loops}
            self._heap = [(worth, place) for worth, place in self._heap if place in self._left]
            heapq.heapify(self._heap)
        return self._best(free_bytes) or self._best_anew(free_bytes)

    def _best_anew(self, free_bytes: float) -> _Offer | None:
        self._heap = [(-_worth(*offer), place) for place, offer in self._left.items()]
        heapq.heapify(self._heap)
        return self._best(free_bytes)

    def _best(self, free_bytes: float) -> _Offer | None:
        while self._heap:
            _, place = heapq.heappop(self._heap)
            demand, position = self._left[place]
            if demand.region.kept_bytes([position]) > free_bytes or not demand.is_worthwhile(position):
                continue
            worth = _worth(demand, position)
            if self._heap and -worth > self._heap[0][0]:
                heapq.heappush(self._heap, (-worth, place))
                continue
            return self._left.pop(place)
        return None


def _worth(demand: Demand, position: int) -> float:
    """Seconds saved for every byte."""
    return demand.gained_s(position) / demand.region.kept_bytes([position])
