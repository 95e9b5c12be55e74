"""Where activations are between forward and backward: on the device, on the host, or nowhere and computed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import keep_over_loops, layer_stacks, offloading
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import RecomputeRegion, find_recomputation
from jax_deepcompile.planner.residency import Choice, Phases, Places, choose
from jax_deepcompile.planner.stacks import every_layer, saved_stacks, saving
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.unshard import ReusedGathers


@dataclass(frozen=True)
class KeepActivations:
    """What a checkpointed layer computes again stays from the forward pass, as far as memory holds it and time gains;
    what the device has no memory for is on the host meanwhile, as far as copies are hidden.

    Once backward waits for the network, computing less does not make it faster: then parameters stay gathered, until it
    waits for compute again, and so on until memory is full.
    """

    name: str = "keep_activations"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or best.plan.of(Prefetch) or best.plan.of(ReusedGathers):
            return
        gathers = best.plan.program(base, environment.mesh, until=SavedGathers)
        regions = find_recomputation(gathers, environment.costs)
        stacks = saved_stacks(base, environment, best.plan, layer_stacks(gathers, best.plan)) if regions else []
        already, phases = places_of(best.plan, regions), Phases.of(best, regions, environment.costs)
        now = taken_bytes(regions, already)
        most_bytes = 0 if OffloadedActivations.kind in environment.disabled else environment.host_bytes
        proposed = None
        for host_bytes in dict.fromkeys((0, most_bytes)):
            proposals = []
            for free_bytes in _budgets(best, environment):
                choice = choose(regions, stacks, phases, now + free_bytes, host_bytes, already)
                if choice is None or (choice.places == already and not choice.stacks):
                    continue
                if environment.fits(best) and choice.gained_s < WORTH_TRYING * best.prediction.step_s:
                    continue
                proposals.append(Proposal(self._plan(base, best.plan, choice, regions, environment), _said(choice)))
            proposal = budget.ladder(proposals)
            if proposal and proposal != proposed:
                yield proposal
            proposed = proposal

    def _plan(
        self,
        base: Program,
        plan: Plan,
        choice: Choice,
        regions: Sequence[RecomputeRegion],
        environment: Environment,
    ) -> Plan:
        plan = offloading(plan, base, environment.mesh, *as_planned(choice.places, regions))
        if choice.stacks:
            plan = plan.having(SavedGathers, saving(choice.stacks))
        return keep_over_loops(base, plan, environment) if plan.of(KeptGathers) else plan


def _budgets(best: Candidate, environment: Environment) -> Iterator[float]:
    """Bytes that may be taken more, the fewest first; less than nothing where ``best`` does not fit."""
    free_bytes = budget.free_bytes(best, environment)
    if free_bytes >= 0:
        yield from (share * free_bytes for share in _SHARES)
    else:
        yield from (free_bytes - share * best.prediction.peak_bytes for share in _LESS)


_SHARES = (0.6, 0.8, 0.92)
"""Of free memory: the most is proposed first, less if that does not fit. The rest is for schedules that hide more and
hold more meanwhile."""

_LESS = (0.15, 0.08, 0.03)
"""Of the peak: likewise, what a program that does not fit has to take less than the limit."""


def _said(choice: Choice) -> str:
    places = choice.places
    count = sum(map(len, places.kept.values()))
    whose = " of every layer" if any(first != second for first, second in places.kept) else ""
    away = sum(map(len, places.offloaded.values()))
    said = [f"{count} activations{whose} are kept"] * bool(count)
    said += [f"{away} of every layer are on the host meanwhile, {choice.host_bytes / 2**30:.2f} GiB"] * bool(away)
    said += [f"{choice.device_bytes / 2**30:+.2f} GiB on the device"]
    return "; ".join([", ".join(said)] + [every_layer(choice.stacks)] * bool(choice.stacks))


def as_planned(
    places: Places, regions: Sequence[RecomputeRegion]
) -> tuple[tuple[KeptActivations, ...], tuple[OffloadedActivations, ...]]:
    """``places`` as a plan has them."""
    names = {region.loops: region.names for region in regions}
    kept = (
        KeptActivations(*loops, tuple(names[loops][position] for position in positions))
        for loops, positions in places.kept.items()
    )
    return tuple(kept), tuple(OffloadedActivations(*loops, away) for loops, away in places.offloaded.items())


def places_of(plan: Plan, regions: Sequence[RecomputeRegion]) -> Places:
    """What ``plan`` says of ``regions``."""
    names = {region.loops: region.names for region in regions}
    kept = {(each.forward, each.backward): each.values for each in plan.of(KeptActivations)}
    positions = {
        loops: tuple(names[loops].index(value) for value in values) for loops, values in kept.items() if loops in names
    }
    return Places(positions, {(each.forward, each.backward): each.values for each in plan.of(OffloadedActivations)})


def taken_bytes(regions: Sequence[RecomputeRegion], places: Places) -> int:
    """What ``places`` take on the device more than the program as it was written."""
    taken = 0
    for region in regions:
        away = places.offloaded.get(region.loops, ())
        here = [each for each in places.kept.get(region.loops, ()) if region.names[each] not in away]
        moved = [each.size_bytes for each in region.residuals if each.name in away]
        taken += region.kept_bytes(here) - region.layers * sum(moved)
    return taken
