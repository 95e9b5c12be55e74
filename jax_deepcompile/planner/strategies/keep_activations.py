"""Where activations are between forward and backward: on the device, on the host, or nowhere and computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import most_argument_bytes
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import copying_ahead, in_place, keep_over_loops
from jax_deepcompile.planner.phases import Phases
from jax_deepcompile.planner.places import Places, saved_s, taken_bytes
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import RecomputeRegion
from jax_deepcompile.planner.residency import WORTH, Choice, choose
from jax_deepcompile.planner.stacks import every_layer, saving
from jax_deepcompile.planner.starts import Start, starts
from jax_deepcompile.planner.state_on_host import (
    HostLeaf,
    argument_bytes,
    host_leaves,
    loop_updates,
    with_state_on_host,
)
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_values import OffloadedValues
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from jax_deepcompile.transforms.unshard import ReusedGathers
from jax_deepcompile.transforms.update_in_loops import UpdatedInLoop


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
        for start in starts(base, best, environment):
            here: dict[float | None, Choice | None] = {}
            chosen = [self._choices(base, best, environment, start, each, here) for each in shares]
            if start.plan == best.plan and _leaves_memory(here, budget.free_bytes(best, environment)):
                chosen.append(self._choices(base, best, environment, start, 0, {}, _WORTH_WITH_ROOM))
            ladders = {ladder.plan: ladder for each in chain(*chosen) for ladder in budget.ladder(each)}
            yield from ladders.values()

    def _choices(
        self,
        base: Program,
        best: Candidate,
        environment: Environment,
        start: Start,
        host_bytes: int,
        here: dict[float | None, Choice | None],
        worth: float = WORTH,
    ) -> tuple[list[Proposal], list[Proposal]]:
        """One for each share of the memory that there is, with layers ahead of their turn; and without.

        The latter takes longer and needs less: that is proposed where a step does not fit, or is so already.

        Args:
          here: what was chosen without the host, by what may be taken of the device. Of choices that are equally good
            the same one is made where nothing would be on the host, though there is room.
        """
        ahead, least = list[Proposal](), list[Proposal]()
        needs_least = not start.is_ahead and not (environment.fits(best) and best.plan.of(LoopSchedule))
        phases = Phases.of(best, environment.costs)
        state = host_leaves(base, environment.disabled, loop_updates(base, start.plan, environment.mesh))
        least_bytes = argument_bytes(base) - most_argument_bytes(environment.costs.hardware.memory_bytes)
        now = taken_bytes(start.regions, start.already, state)
        for free_bytes, movable in _budgets(best, environment, state, _SHARES if worth == WORTH else _SPARE):
            taken = None if free_bytes is None else now + start.freed_bytes + free_bytes
            room = taken, host_bytes, start.already, movable, least_bytes
            choice = choose(start.regions, start.stacks, phases, *room, worth)
            if not host_bytes:
                here[taken] = choice
            elif choice is not None and not choice.host_bytes:
                choice = here.get(taken, choice)
            if choice is None or (choice.places == start.already and not start.gained_s):
                continue
            less_s = sum(saved_s(each, choice.places) - saved_s(each, start.already) for each in start.regions)
            gained_s = less_s if choice.stacks else choice.gained_s  # others find room for stacks alone
            gained_s += start.gained_s
            is_known = best.plan.of(Rematerialized) or not start.plan.of(Rematerialized)  # what stacks of loops cost
            if environment.fits(best) and is_known and gained_s < WORTH_TRYING * best.prediction.step_s:
                continue
            plan = as_planned(start.plan, choice.places, start.regions)
            if choice.stacks:
                plan = plan.having(SavedGathers, saving(choice.stacks))
            is_updated_alone = not all(state[name].in_loop for name in choice.places.state)
            for by_layer in (True, False) if is_updated_alone else (False,):
                there = with_state_on_host(plan, base, choice.places.state, environment, by_layer)
                said = start.said + _said(choice) + ", updated a layer at a time" * by_layer
                alone = in_place(there.without(LoopSchedule, StackCollectives), base)
                there = in_place(copying_ahead(there, base, environment.mesh), base)
                if plan.of(KeptGathers):
                    there, alone = (keep_over_loops(base, each, environment) for each in (there, alone))
                ahead.append(Proposal(there, said))
                in_turn = any(each.copied for each in there.of(UpdatedInLoop))  # that has nothing to hide beside
                if needs_least and not in_turn and alone.decisions != there.decisions:
                    least.append(Proposal(alone, f"{said}, with no layer ahead of its turn"))
        return ahead, least


def _budgets(
    best: Candidate, environment: Environment, state: Mapping[str, HostLeaf], shares: Sequence[float]
) -> Iterator[tuple[float | None, Mapping[str, HostLeaf]]]:
    """Bytes that may be taken more, the fewest first, and what of the state may be on the host; less than nothing where
    ``best`` does not fit.

    There the first are as few as can be, None: if not even those fit, how many they are is what a limit has to be. As
    what that frees may be more than it is known to, it is also proposed without parameters, and without any state.
    """
    free_bytes = budget.free_bytes(best, environment)
    if free_bytes >= 0:
        yield from ((share * free_bytes, state) for share in shares)
    else:
        moments = {name: leaf for name, leaf in state.items() if not leaf.reads}
        yield from ((None, movable) for movable in (state, moments, {}))
        yield from ((free_bytes - share * best.prediction.peak_bytes, state) for share in _LESS)


_SHARES = (0.6, 0.8, 0.92)
"""Of free memory: the most is proposed first, less if that does not fit. The rest is for schedules that hide more and
hold more meanwhile."""

_LESS = (0.15, 0.08, 0.03, 0.01, 0.0)
"""Of the peak: likewise, what a program that does not fit has to take less than the limit."""


def _leaves_memory(here: Mapping[float | None, Choice | None], free_bytes: int) -> bool:
    """Whether the largest choice leaves most of what is free, for all else is taken to be cheaper to compute again.

    How much of that XLA does beside other work is not known before it is compiled.
    """
    taken, choice = list(here.items())[-1]
    if taken is None or choice is None or free_bytes <= 0:
        return False
    return taken - choice.device_bytes > _MOST * free_bytes


_MOST = 0.5
"""Of free memory."""

_WORTH_WITH_ROOM = 1.0
"""As ``WORTH``, where most memory is left: as if XLA did nothing of cheap work beside other."""

_SPARE = (0.3, 0.6)
"""As ``_SHARES``, then. XLA may keep, beside what is kept, what forward and backward both make of it."""


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
