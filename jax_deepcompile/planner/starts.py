"""Plans in which places of activations are chosen: the best so far, and others that compute again what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.costs.program_memory import memory_of_program
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import stacks_in_turn
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import all_pipelined, layer_stacks, not_pipelined
from jax_deepcompile.planner.phases import Phases
from jax_deepcompile.planner.places import Places, taken_bytes
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import RecomputeRegion, find_recomputation
from jax_deepcompile.planner.stacks import Stack, saved_stacks
from jax_deepcompile.planner.state_on_host import updatable
from jax_deepcompile.transforms.accumulate_in_loops import AccumulateInLoops
from jax_deepcompile.transforms.gradients_in_turn import GradientsInTurn
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_on_device import KeptOnDevice, copies
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.offload_values import OffloadedValues
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.rematerialize import Rematerialized, recomputable
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments, segments_of
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from jax_deepcompile.transforms.update_in_loops import UpdatedInLoop, in_turn


@dataclass(frozen=True)
class Start:
    """A plan to choose places in.

    Attributes:
      already: what is where, in the best plan so far.
      stacks: what may stay gathered.
      said: what the plan decides more than that one, in words.
      freed_bytes: what the plan takes less on the device than that one, beside what ``already`` is at hand.
      gained_s: what the plan itself may gain.
      is_ahead: whether it is the best one with layers ahead of their turn.
    """

    plan: Plan
    regions: Sequence[RecomputeRegion]
    already: Places
    stacks: Sequence[Stack] = ()
    said: str = ""
    freed_bytes: int = 0
    gained_s: float = 0.0
    is_ahead: bool = False


def starts(base: Program, best: Candidate, environment: Environment) -> Iterator[Start]:
    """All there are: the best plan; one with pipelined loops, if those did not fit; one that computes again what loops
    and segments keep, each loop's iterations by themselves; one with smaller segments, if those leave too much; one
    that computes loops inside of layers again as a whole; one that computes again what those that it runs again keep;
    one that copies nothing of itself."""
    gathers = best.plan.program(base, environment.mesh, until=SavedGathers)
    regions = _regions(gathers, environment)
    stacks = saved_stacks(base, environment, best.plan, layer_stacks(gathers, best.plan)) if regions else []
    loops: Mapping[Rematerialized, Collection[str]] = {}
    segments: Mapping[RematerializedSegments, Collection[str]] = {}
    whole: Mapping[RematerializedSegments, Collection[str]] = {}
    if not any(map(best.plan.of, (Rematerialized, RematerializedSegments, KeptActivations))):
        loops = dict(_loops_again(base, regions, environment))
        segments = dict(_segments_again(base, regions, environment))
        whole = dict(_layers_again(base, regions, environment))
    named = {(each.where, each.where) for each in segments}
    here = [replace(each, residuals=()) if each.loops in named else each for each in regions]
    yield Start(best.plan, here, places_of(best.plan, regions), stacks)
    yield from _updating_in_second_run(base, best, environment, regions)
    yield from _pipelined(base, best, environment)
    again = _computing_again(base, best, environment, regions, loops, segments)
    smaller = {}
    if segments and environment.host_bytes and not (again and _suffices(again, best, environment)):
        smaller = dict(_segments_again(base, regions, environment, on_host=True))
    others = [({}, each) for each in (smaller, whole) if each != segments]
    inside = _inside_again(base, loops, environment) if loops else loops
    others += [(inside, segments)] if inside != loops else []
    yield from filter(None, [again, *(_computing_again(base, best, environment, regions, *each) for each in others)])
    yield from _without_own_copies(base, best, environment)


def _pipelined(base: Program, best: Candidate, environment: Environment) -> Iterator[Start]:
    """One whose loops gather a layer ahead, for which there is no memory unless something else makes room."""
    if best.plan.of(LoopSchedule):
        return
    plan = as_checkpointed(base, best.plan, best.plan.of(Rematerialized), environment)
    if plan.of(LoopSchedule):
        before, after = (each.program(base, environment.mesh, until=SavedGathers) for each in (best.plan, plan))
        more_bytes = memory_of_program(after).live_peak_bytes - memory_of_program(before).live_peak_bytes
        if more_bytes > budget.free_bytes(best, environment):
            regions, gained_s = _regions(after, environment), best.prediction.exposed_s
            said = f"{len(plan.of(LoopSchedule))} loops gather a layer ahead; "
            yield Start(plan, regions, places_of(plan, regions), (), said, -more_bytes, gained_s, is_ahead=True)


def _updating_in_second_run(
    base: Program, best: Candidate, environment: Environment, regions: Sequence[RecomputeRegion]
) -> Iterator[Start]:
    """One whose backward loops run twice, so that moments on the host are copied beside the second run."""
    gained_s = best.prediction.exposed_copy_s - Phases.of(best, environment.costs).backward_s
    is_pointless = environment.fits(best) and gained_s < WORTH_TRYING * best.prediction.step_s
    if environment.mesh.size > 1 or is_pointless or best.plan.of(UpdatedInLoop):
        return
    if UpdatedInLoop.kind in environment.disabled:
        return
    program = best.plan.program(base, environment.mesh, until=AccumulateInLoops)
    found = updatable(program, environment.mesh, twice=True)
    if found:
        stacks = (var for update, _ in in_turn(program, environment.mesh, found) for var in update.dropped)
        freed_bytes = sum(map(size_bytes, stacks))
        plan, already = best.plan.having(UpdatedInLoop, found), places_of(best.plan, regions)
        said = f"{len(found)} backward loops run twice and update the state of their layers; "
        yield Start(plan, regions, already, said=said, freed_bytes=freed_bytes, gained_s=max(gained_s, 0.0))


def _computing_again(
    base: Program,
    best: Candidate,
    environment: Environment,
    regions: Sequence[RecomputeRegion],
    loops: Mapping[Rematerialized, Collection[str]],
    segments: Mapping[RematerializedSegments, Collection[str]],
) -> Start | None:
    """None if that takes no less memory."""
    if not loops and not segments:
        return None
    plan = as_checkpointed(base, best.plan, tuple(loops), environment)
    after = plan.program(base, environment.mesh, until=SavedGathers)
    less_bytes = 0
    if segments:
        again = plan.having(RematerializedSegments, segments)
        if any(each.with_loops for each in segments):
            again = again.replace(options=dict(plan.options) | stacks_in_turn())
        shorter = again.program(base, environment.mesh, until=SavedGathers)
        now_bytes = memory_of_program(after).live_peak_bytes
        if best.plan.of(GradientsInTurn):  # so XLA holds what is read and no more; of others it knows how to hold less
            now_bytes = best.prediction.peak_bytes
        less_bytes = now_bytes - memory_of_program(shorter).live_peak_bytes
        if less_bytes > 0:
            plan, after = again, shorter
        elif not loops:
            return None
    found = _regions(after, environment)
    dropped = {(each.forward, each.backward): names for each, names in loops.items()}
    dropped |= {(each.where, each.where): names for each, names in segments.items()}
    kept = {
        region.loops: tuple(place for place, name in enumerate(region.names) if name in dropped.get(region.loops, ()))
        for region in found
    }
    said = f"{len(loops)} backward loops compute again what they read of forward ones; " * bool(loops)
    said += f"{sum(each.segments for each in segments)} segments are computed again; " * (less_bytes > 0)
    already = Places(kept)
    freed_bytes = max(less_bytes, 0) - taken_bytes(found, already, {})
    freed_bytes += _held_bytes(regions) - _held_bytes(found) if loops else 0
    return Start(plan, found, already, said=said, freed_bytes=freed_bytes)


def _suffices(start: Start, best: Candidate, environment: Environment) -> bool:
    """Whether ``start``, with nothing at hand that it computes again, makes a step fit that does not."""
    less_bytes = start.freed_bytes + taken_bytes(start.regions, start.already, {})
    return less_bytes + budget.free_bytes(best, environment) >= 0


def _without_own_copies(base: Program, best: Candidate, environment: Environment) -> Iterator[Start]:
    """One that keeps on the device what the step copies to the host by itself."""
    if best.plan.of(KeptOnDevice) or KeptOnDevice.kind in environment.disabled or not copies(base):
        return
    plan, mesh = best.plan.having(KeptOnDevice, [KeptOnDevice()]), environment.mesh
    before, after = (_regions(each.program(base, mesh, until=SavedGathers), environment) for each in (best.plan, plan))
    freed_bytes, said = _held_bytes(before) - _held_bytes(after), f"{KeptOnDevice.says}; "
    gained_s = best.prediction.exposed_copy_s
    yield Start(plan, after, places_of(plan, after), said=said, freed_bytes=freed_bytes, gained_s=gained_s)


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


def _inside_again(
    base: Program, loops: Mapping[Rematerialized, Collection[str]], environment: Environment
) -> Mapping[Rematerialized, Collection[str]]:
    """``loops``, and those inside of them which those run again."""
    program = Rematerialized.apply(base, environment.mesh, tuple(loops))
    inner = dict(_loops_again(program, _regions(program, environment), environment))
    return {**loops, **inner} if inner.keys() != loops.keys() else loops


def _segments_again(
    base: Program, regions: Sequence[RecomputeRegion], environment: Environment, on_host: bool = False
) -> Iterator[tuple[RematerializedSegments, Collection[str]]]:
    """Likewise, where no loop runs most layers; ``on_host`` as of ``segments_of``."""
    leaving = {each.loops[0] for each in regions if not each.is_of_loops and each.residuals}
    if leaving and RematerializedSegments.kind not in environment.disabled:
        yield from (found for found in segments_of(base, on_host=on_host) if found[0].where in leaving)


def _layers_again(
    base: Program, regions: Sequence[RecomputeRegion], environment: Environment
) -> Iterator[tuple[RematerializedSegments, Collection[str]]]:
    """Likewise, where layers that no loop runs have loops inside, over time steps or parts of a sequence."""
    loops = {loop.name: loop for loop in find_loops(base)}
    names = {loop.path: loop.name for loop in loops.values()} | {(): ""}
    kept = [loops[each.loops[0]].path[:-1] for each in regions if each.is_of_loops and each.residuals]
    unrolled = {names[path] for path, pairs in Counter(kept).items() if pairs > 1 and path in names}
    if unrolled and RematerializedSegments.kind not in environment.disabled:
        yield from (found for found in segments_of(base, with_loops=True) if found[0].where in unrolled)


def _held_bytes(regions: Sequence[RecomputeRegion]) -> int:
    """What forward loops leave for backward ones."""
    return sum(region.layers * each.size_bytes for region in regions if region.is_of_loops for each in region.residuals)


def as_checkpointed(
    base: Program, plan: Plan, rematerialized: Sequence[Rematerialized], environment: Environment
) -> Plan:
    """``plan`` where loops compute again what is ``rematerialized``, and where that hides anything are pipelined."""
    start = not_pipelined(plan).without(
        Rematerialized, SavedGathers, StackCollectives, OffloadedActivations, OffloadedValues
    )
    program = Rematerialized.apply(base, environment.mesh, rematerialized)
    if environment.platform == "cuda" and choose_schedules(program):
        start = all_pipelined(start, program, environment)
    return start.having(Rematerialized, rematerialized)


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
