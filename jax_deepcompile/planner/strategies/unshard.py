"""What stays gathered: parameters of every layer, whole layers, and what surrounds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax_deepcompile.analysis.gathers import by_value, hoistable_gathers
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.costs.simulation import Loop as SimulatedLoop
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import AS_READ, gathered_bytes, keep_over_loops, layer_stacks, not_pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.stacks import (
    Stack,
    every_layer,
    repeated_stacks,
    saved_stacks,
    saving,
    with_gathers,
)
from jax_deepcompile.planner.state_on_host import HostLeaf, host_leaves, with_state_on_host
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives

_FEW_LAYERS = 12
"""So many may run apart from their loops although what they gather could be saved: XLA compiles each, and schedules
collectives of one beside kernels of another."""


@dataclass(frozen=True)
class Unshard:
    """As many layers stay gathered as memory holds: from forward to backward, and over all microbatches."""

    name: str = "unshard"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or not best.waits:
            return
        pairs = layer_stacks(_unpipelined(base, best.plan.without(SavedGathers), environment), best.plan)
        if not _gathered_again(base, best.plan, environment, pairs):
            return
        free_bytes = budget.free_bytes(best, environment)
        if not best.plan.of(KeptGathers):
            size = _hoistable_bytes(best.plan.program(base, environment.mesh, until=AS_READ))
            free_bytes -= size
            if size and free_bytes >= 0:
                decision = f"what every microbatch gathers before and after its layers is kept, {size / 2**30:.2f} GiB"
                yield Proposal(keep_over_loops(base, best.plan, environment), decision)
        kept = list(_over_microbatches(base, best, environment, free_bytes))
        yield from kept or _from_forward_to_backward(base, best, environment, pairs, free_bytes)


def _over_microbatches(base: Program, best: Candidate, environment: Environment, free_bytes: int) -> Iterator[Proposal]:
    """Some parameters of every layer gathered once for all microbatches: more of them where the moments that the update
    alone reads make room."""
    repeated = [loop for loop in _layer_loops(best) if loop.executions > 1]
    forward = [loop for loop in repeated if not loop.trip.reduced_bytes]
    backward = [loop for loop in repeated if loop.trip.reduced_bytes]
    waiting_bytes = max(_waiting_bytes(forward), _waiting_bytes(backward))

    def keeping(stacks: Sequence[Stack]) -> Plan:
        plan = best.plan.having(StackCollectives, with_gathers(best.plan.of(StackCollectives), stacks))
        return keep_over_loops(base, plan, environment)

    program = best.plan.program(base, environment.mesh, until=Rematerialized)
    stacks = repeated_stacks(program, best.plan.of(StackCollectives))
    here = _most_and_enough(stacks, free_bytes, waiting_bytes)
    for chosen in here:
        yield from _or_less(keeping, stacks, chosen)
    moments = {} if best.plan.of(OffloadedState) else _moments(base, environment)
    room_bytes = budget.total_bytes(moments.values())
    if room_bytes > environment.host_bytes:
        return
    there = _most_and_enough(stacks, free_bytes + room_bytes, waiting_bytes)
    for chosen, by_layer in itertools.product((some for some in there if some not in here), (True, False)):

        def away(stacks: Sequence[Stack], by_layer: bool = by_layer) -> Plan:
            return with_state_on_host(keeping(stacks), base, tuple(moments), environment, by_layer)

        said = f"; moments are on the host between steps, {room_bytes / 2**30:.2f} GiB"
        yield from _or_less(away, stacks, chosen, said)


def _moments(base: Program, environment: Environment) -> dict[str, HostLeaf]:
    """All of the optimizer's state that may be on the host: read once a step, however many microbatches it has."""
    leaves = host_leaves(base, environment.disabled)
    return {name: leaf for name, leaf in leaves.items() if not leaf.reads}


def _from_forward_to_backward(
    base: Program, best: Candidate, environment: Environment, pairs: list[tuple[Loop, Loop]], free_bytes: int
) -> Iterator[Proposal]:
    """Parameters of every layer saved from forward to backward; where none are left, or few layers, whole layers."""
    waiting_bytes = _waiting_bytes(loop for loop in _layer_loops(best) if loop.trip.reduced_bytes)
    if not waiting_bytes:
        return

    def keeping(stacks: Sequence[Stack]) -> Plan:
        return best.plan.having(SavedGathers, saving(stacks))

    stacks = saved_stacks(base, environment, best.plan, pairs)
    saved = _most_and_enough(stacks, free_bytes, waiting_bytes)
    for chosen in saved:
        yield from _or_less(keeping, stacks, chosen)
    if best.plan.of(LoopSchedule) and (not saved or max(forward.length for forward, _ in pairs) <= _FEW_LAYERS):
        yield from _whole_layers(base, best, environment, pairs, free_bytes)


def _most_and_enough(stacks: Sequence[Stack], free_bytes: int, waiting_bytes: int) -> list[tuple[Stack, ...]]:
    """As many of ``stacks`` as fit; and, if those are fewer, as many as will do for loops not to wait.

    What is kept over microbatches is gathered before the first one, with nothing to hide under.
    """
    enough = budget.enough_bytes(stacks, min(waiting_bytes, free_bytes))
    choices = dict.fromkeys(map(tuple, (budget.most_bytes(stacks, free_bytes), enough)))
    return [some for some in choices if some and budget.total_bytes(some) <= free_bytes]


def _or_less(
    keeping: Callable[[Sequence[Stack]], Plan], stacks: Sequence[Stack], chosen: Sequence[Stack], said: str = ""
) -> tuple[Proposal, ...]:
    """``chosen`` of ``stacks`` kept; where buffers lie so badly that they do not fit, those that take a little less."""
    less = budget.most_bytes(stacks, int(budget.SLIGHTLY_LESS * budget.total_bytes(chosen)))
    return budget.ladder(Proposal(keeping(some), every_layer(some) + said) for some in (less, chosen) if some)


def _whole_layers(
    base: Program,
    best: Candidate,
    environment: Environment,
    pairs: list[tuple[Loop, Loop]],
    free_bytes: int,
) -> tuple[Proposal, ...]:
    """More layers gathered once for forward and backward: as many as may fit, otherwise as surely do."""
    per_layer = _gathered_again(base, best.plan, environment, pairs)
    surely = hoped = int(free_bytes // (budget.BUFFER_OVERHEAD * per_layer))
    already = kept_layers(best.plan, pairs)
    once = all(len(forward.path) == 1 for forward, _ in pairs)
    if once and not already:
        spare_bytes = free_bytes + best.prediction.peak_bytes - _layer_peak_bytes(best)
        hoped = max(surely, spare_bytes // sum(gathered_bytes(forward) for forward, _ in pairs))
    least_bytes = _worthwhile_bytes(best) if once else 0
    if (hoped - surely) * per_layer < least_bytes:
        hoped = surely
    longest = max(forward.length for forward, _ in pairs)
    return budget.ladder(
        Proposal(
            keep_over_loops(base, keep_layers(best.plan, pairs, layers), environment),
            f"{layers} of {longest} layers stay gathered, {per_layer / 2**30:.2f} GiB each",
        )
        for layers in sorted({min(already + more, longest - 1) for more in (surely, hoped)})
        if layers > already and (layers - already) * per_layer >= least_bytes
    )


def _layer_peak_bytes(best: Candidate) -> int:
    """What is in memory where layers run, forward or backward: less than the peak, if that is elsewhere."""
    memory = best.simulation.memory
    live_bytes = dict(zip(memory.names, memory.live_bytes, strict=True))
    loops = [live_bytes[loop.name] for loop in best.simulation.loops if loop.trip.gathered_bytes]
    return max(loops, default=best.prediction.peak_bytes)


def _worthwhile_bytes(best: Candidate) -> float:
    """What must be gathered less to be worth trying."""
    simulation = best.simulation
    moved = simulation.gathered_bytes + simulation.reduced_bytes
    return WORTH_TRYING * best.prediction.step_s * moved / max(simulation.communication_s, 1e-12)


def _layer_loops(best: Candidate) -> list[SimulatedLoop]:
    return [loop for loop in best.simulation.loops if loop.is_innermost and loop.trip.gathered_bytes]


def _waiting_bytes(loops: Iterable[SimulatedLoop]) -> int:
    """What loops would have to gather less, each time they run, for the network not to take longer than compute."""
    total = 0.0
    for loop in loops:
        trip, waits_s = loop.trip, loop.trip.communication_s - loop.trip.compute_s
        if waits_s > 0:
            bytes_per_s = (trip.gathered_bytes + trip.reduced_bytes) / trip.communication_s
            total += loop.trip_count * min(waits_s * bytes_per_s, trip.gathered_bytes)
    return int(total)


def _gathered_again(base: Program, plan: Plan, environment: Environment, pairs: Sequence[tuple[Loop, Loop]]) -> int:
    """The bytes of one layer that the backward loops of ``pairs`` gather where ``plan`` is carried out."""
    again = {backward.name for _, backward in pairs}
    program = _unpipelined(base, plan, environment)
    return sum(gathered_bytes(loop) for loop in find_loops(program) if loop.name in again)


def _unpipelined(base: Program, plan: Plan, environment: Environment) -> Program:
    """``base`` with what ``plan`` says of layer loops, each as it is."""
    return not_pipelined(plan).program(base, environment.mesh, until=AS_READ)


def _hoistable_bytes(program: Program) -> int:
    """What gathering once before the loops that gather it again and again would hold all the time."""
    values = (same for loop in find_loops(program) for same in by_value(hoistable_gathers(loop.eqn)))
    return budget.total_bytes(same[0] for same in values)


def keep_layers(plan: Plan, pairs: list[tuple[Loop, Loop]], layers: int) -> Plan:
    """The last ``layers`` of every stack run apart, so that forward and backward gather them together."""
    schedules = {schedule.loop: schedule for schedule in plan.of(LoopSchedule)}
    for forward, backward in pairs:
        count = min(layers, forward.length)
        ahead, behind = schedules[forward.name], schedules[backward.name]
        last = max(ahead.last_layers, count + ahead.prefetch_layers)
        schedules[forward.name] = replace(ahead, last_layers=last)
        schedules[backward.name] = replace(behind, first_layers=max(behind.first_layers, count))
    return plan.having(LoopSchedule, schedules.values())


def kept_layers(plan: Plan, pairs: list[tuple[Loop, Loop]]) -> int:
    """How many layers ``plan`` already runs apart between forward and backward, and so keeps gathered."""
    schedules = {schedule.loop: schedule for schedule in plan.of(LoopSchedule)}
    return min(
        min(
            schedules[forward.name].last_layers - schedules[forward.name].prefetch_layers,
            schedules[backward.name].first_layers,
        )
        for forward, backward in pairs
    )
