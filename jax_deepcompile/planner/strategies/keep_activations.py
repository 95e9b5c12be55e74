"""Where activations are between forward and backward: on the device, on the host, or nowhere and computed again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.names import keeping_loop_names
from jax_deepcompile.costs.program_memory import memory_of_program
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import copying_ahead, keep_over_loops, layer_stacks, not_pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import RecomputeRegion, find_recomputation
from jax_deepcompile.planner.residency import Choice, Phases, Places, choose, saved_s, taken_bytes
from jax_deepcompile.planner.stacks import Stack, every_layer, saved_stacks, saving
from jax_deepcompile.planner.state_on_host import host_leaves, with_state_on_host
from jax_deepcompile.planner.strategies.pipeline_loops import PipelineLoops
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.keep_on_device import KeptOnDevice, copies
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.offload_values import OffloadedValues
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.rematerialize import Rematerialized, recomputable
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments, segments_of
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
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
        shares = dict.fromkeys((0, environment.host_bytes))
        for start in chain(_starts(base, best, environment), _without_own_copies(base, best, environment)):
            chosen = (self._choices(base, best, environment, start, each) for each in shares)
            ladders = {ladder.plan: ladder for each in chosen for ladder in budget.ladder(each)}
            yield from ladders.values()

    def _choices(
        self, base: Program, best: Candidate, environment: Environment, start: _Start, host_bytes: int
    ) -> Iterator[Proposal]:
        """One for each share of the memory that there is."""
        phases = Phases.of(best, start.regions, environment.costs)
        state = host_leaves(base, environment.disabled)
        now = taken_bytes(start.regions, start.already, state)
        for free_bytes in _budgets(best, environment):
            taken = None if free_bytes is None else now + start.freed_bytes + free_bytes
            choice = choose(start.regions, start.stacks, phases, taken, host_bytes, start.already, state)
            if choice is None or (choice.places == start.already and not start.gained_s):
                continue
            less_s = sum(saved_s(each, choice.places) - saved_s(each, start.already) for each in start.regions)
            gained_s = less_s if choice.stacks else choice.gained_s  # others find room for stacks alone
            gained_s += start.gained_s
            if environment.fits(best) and gained_s < WORTH_TRYING * best.prediction.step_s:
                continue
            plan = as_planned(start.plan, choice.places, start.regions)
            if choice.stacks:
                plan = plan.having(SavedGathers, saving(choice.stacks))
            for by_layer in (True, False) if choice.places.state else (False,):
                there = with_state_on_host(plan, base, choice.places.state, environment, by_layer)
                said = start.said + _said(choice) + ", updated a layer at a time" * by_layer
                if taken is None:
                    least = there.without(LoopSchedule, StackCollectives)
                    yield Proposal(least, f"{said}, with no layer ahead of its turn")
                there = copying_ahead(there, base, environment.mesh)
                there = keep_over_loops(base, there, environment) if there.of(KeptGathers) else there
                yield Proposal(there, said)


@dataclass(frozen=True)
class _Start:
    """A plan to choose places in.

    Attributes:
      already: what is where, in the best plan so far.
      stacks: what may stay gathered.
      said: what the plan decides more than that one, in words.
      freed_bytes: what the plan takes less on the device than that one, beside what ``already`` is at hand.
      gained_s: what the plan itself may gain.
    """

    plan: Plan
    regions: Sequence[RecomputeRegion]
    already: Places
    stacks: Sequence[Stack]
    said: str = ""
    freed_bytes: int = 0
    gained_s: float = 0.0


def _starts(base: Program, best: Candidate, environment: Environment) -> Iterator[_Start]:
    """The best plan; and one that computes everything again that it keeps from loop to loop, to begin with."""
    mesh = environment.mesh
    gathers = best.plan.program(base, mesh, until=SavedGathers)
    regions = _regions(gathers, environment)
    stacks = saved_stacks(base, environment, best.plan, layer_stacks(gathers, best.plan)) if regions else []
    loops, segments = {}, {}
    if not any(map(best.plan.of, (Rematerialized, RematerializedSegments, KeptActivations))):
        loops, segments = (
            dict(_loops_again(base, regions, environment)),
            dict(_segments_again(base, regions, environment)),
        )
    named = {(each.where, each.where) for each in segments}
    here = [replace(each, residuals=()) if each.loops in named else each for each in regions]
    yield _Start(best.plan, here, places_of(best.plan, regions), stacks)
    if not loops and not segments:
        return
    plan = as_checkpointed(base, best.plan, tuple(loops), environment)
    held_bytes, before = _held_bytes(regions), plan.program(base, mesh, until=SavedGathers)
    again = plan.having(RematerializedSegments, segments)
    after = again.program(base, mesh, until=SavedGathers) if segments else before
    less_bytes = memory_of_program(before).live_peak_bytes - memory_of_program(after).live_peak_bytes if segments else 0
    if less_bytes <= 0 and not loops:
        return
    plan, after = (again, after) if less_bytes > 0 else (plan, before)
    regions = _regions(after, environment)
    dropped = {(each.forward, each.backward): names for each, names in loops.items()}
    dropped |= {(each.where, each.where): names for each, names in segments.items()}
    kept = {
        region.loops: tuple(place for place, name in enumerate(region.names) if name in dropped.get(region.loops, ()))
        for region in regions
    }
    said = f"{len(loops)} backward loops compute again what they read of forward ones; " * bool(loops)
    said += f"{sum(each.segments for each in segments)} segments are computed again; " * (less_bytes > 0)
    already = Places(kept)
    freed_bytes = held_bytes - _held_bytes(regions) + max(less_bytes, 0) - taken_bytes(regions, already, {})
    yield _Start(plan, regions, already, (), said, freed_bytes)


def _without_own_copies(base: Program, best: Candidate, environment: Environment) -> Iterator[_Start]:
    """One that keeps on the device what the step copies to the host by itself."""
    if best.plan.of(KeptOnDevice) or KeptOnDevice.kind in environment.disabled or not copies(base):
        return
    plan, mesh = best.plan.having(KeptOnDevice, [KeptOnDevice()]), environment.mesh
    before, after = (_regions(each.program(base, mesh, until=SavedGathers), environment) for each in (best.plan, plan))
    freed_bytes, said = _held_bytes(before) - _held_bytes(after), f"{KeptOnDevice.says}; "
    yield _Start(plan, after, places_of(plan, after), (), said, freed_bytes, best.prediction.exposed_copy_s)


def _regions(program: Program, environment: Environment) -> list[RecomputeRegion]:
    """What of ``program`` there is to decide, and may go to the host."""

    def goes_by(region: RecomputeRegion) -> str:
        return OffloadedActivations.kind if region.is_of_loops else OffloadedValues.kind

    found = find_recomputation(program, environment.costs)
    return [each.staying() if goes_by(each) in environment.disabled else each for each in found]


def _loops_again(
    base: Program, regions: Sequence[RecomputeRegion], environment: Environment
) -> Iterator[tuple[Rematerialized, Collection[str]]]:
    """Pairs of loops of which the second could compute again what the first keeps for it, and what that is called."""
    loops = {loop.name: loop for loop in find_loops(base)}
    for ahead, behind in (each.loops for each in regions if each.is_of_loops and each.residuals):
        again = recomputable(base, loops[ahead], loops[behind])
        if again is not None and Rematerialized.kind not in environment.disabled:
            yield Rematerialized(ahead, behind), again.names


def _segments_again(
    base: Program, regions: Sequence[RecomputeRegion], environment: Environment
) -> Iterator[tuple[RematerializedSegments, Collection[str]]]:
    """Likewise, where no loop runs most layers."""
    leaving = {each.loops[0] for each in regions if not each.is_of_loops and each.residuals}
    if leaving and RematerializedSegments.kind not in environment.disabled:
        yield from (found for found in segments_of(base) if found[0].where in leaving)


def _held_bytes(regions: Sequence[RecomputeRegion]) -> int:
    """What forward loops leave for backward ones."""
    return sum(region.layers * each.size_bytes for region in regions if region.is_of_loops for each in region.residuals)


def as_checkpointed(
    base: Program, plan: Plan, rematerialized: Sequence[Rematerialized], environment: Environment
) -> Plan:
    """``plan`` where loops compute again what is ``rematerialized``, all layer loops pipelined."""
    start = not_pipelined(plan).without(SavedGathers, StackCollectives, OffloadedActivations, OffloadedValues)
    program = Rematerialized.apply(base, environment.mesh, rematerialized)
    program = keeping_loop_names(program, base)
    for proposal in PipelineLoops().propose(program, Candidate(start, program), environment):
        start = proposal.plan
    return start.having(Rematerialized, rematerialized)


def _budgets(best: Candidate, environment: Environment) -> Iterator[float | None]:
    """Bytes that may be taken more, the fewest first; less than nothing where ``best`` does not fit.

    There the first are as few as can be, None: if not even those fit, how many they are is what a limit has to be.
    """
    free_bytes = budget.free_bytes(best, environment)
    if free_bytes >= 0:
        yield from (share * free_bytes for share in _SHARES)
    else:
        yield None
        yield from (free_bytes - share * best.prediction.peak_bytes for share in _LESS)


_SHARES = (0.6, 0.8, 0.92)
"""Of free memory: the most is proposed first, less if that does not fit. The rest is for schedules that hide more and
hold more meanwhile."""

_LESS = (0.15, 0.08, 0.03, 0.0)
"""Of the peak: likewise, what a program that does not fit has to take less than the limit."""


def _said(choice: Choice) -> str:
    places = choice.places
    count = sum(map(len, places.kept.values()))
    whose = " of every layer" if any(first != second for first, second in places.kept) else ""
    away = sum(map(len, places.offloaded.values()))
    each = " of every layer" if any(first != second for first, second in places.offloaded) else ""
    said = [f"{count} activations{whose} are kept"] * bool(count)
    said += [f"{away}{each} are on the host meanwhile, {choice.host_bytes / 2**30:.2f} GiB"] * bool(away)
    said += [f"{len(places.state)} leaves of the state are on the host between steps"] * bool(places.state)
    said += [f"{choice.device_bytes / 2**30:+.2f} GiB on the device"]
    return "; ".join([", ".join(said)] + [every_layer(choice.stacks)] * bool(choice.stacks))


def as_planned(plan: Plan, places: Places, regions: Sequence[RecomputeRegion]) -> Plan:
    """``plan`` with ``places``, and no others."""
    names = {region.loops: region.names for region in regions}
    kept = (
        KeptActivations(*loops, tuple(names[loops][position] for position in positions))
        for loops, positions in places.kept.items()
    )
    of_loops = [OffloadedActivations(*loops, away) for loops, away in places.offloaded.items() if loops[0] != loops[1]]
    others = [OffloadedValues(loops[0], away) for loops, away in places.offloaded.items() if loops[0] == loops[1]]
    return plan.having(KeptActivations, kept).having(OffloadedActivations, of_loops).having(OffloadedValues, others)


def places_of(plan: Plan, regions: Sequence[RecomputeRegion]) -> Places:
    """What ``plan`` says of ``regions``."""
    names = {region.loops: region.names for region in regions}
    kept = {(each.forward, each.backward): each.values for each in plan.of(KeptActivations)}
    positions = {
        loops: tuple(names[loops].index(value) for value in values) for loops, values in kept.items() if loops in names
    }
    offloaded = {(each.forward, each.backward): each.values for each in plan.of(OffloadedActivations)}
    offloaded |= {(each.where, each.where): each.values for each in plan.of(OffloadedValues)}
    return Places(positions, offloaded, tuple(name for each in plan.of(OffloadedState) for name in each.leaves))
