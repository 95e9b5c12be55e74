"""What stays gathered: parameters of every layer, whole layers, and what surrounds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from jax_deepcompile.analysis.gathers import hoistable_gathers, size_bytes
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.parts import split_body
from jax_deepcompile.costs.simulation import Loop as SimulatedLoop
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.apply import apply_loops
from jax_deepcompile.planner.candidate import WORTH_TRYING, Environment, Trial
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.search import Proposal
from jax_deepcompile.planner.stacks import (
    Stack,
    enough_bytes,
    handing_over,
    most_bytes,
    repeated_stacks,
    total_bytes,
    turning_stacks,
    with_gathers,
)
from jax_deepcompile.planner.strategies.keep_gathered import keep_gathered
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule


@dataclass(frozen=True)
class Unshard:
    """As many layers stay gathered as memory holds: from forward to backward, and over all microbatches."""

    name: str = "unshard"

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or not now.waits:
            return
        pairs = layer_stacks(apply_loops(base, environment.mesh, now.plan.replace(loops=(), handed_over=())), now.plan)
        if not _gathered_again(base, now.plan, environment, pairs):
            return
        free_bytes = environment.limit_bytes - now.prediction.peak_bytes
        if not now.plan.kept:
            size = _hoistable_bytes(apply_loops(base, environment.mesh, now.plan))
            free_bytes -= size
            if size and free_bytes >= 0:
                decision = f"what every microbatch gathers before and after its layers is kept, {size / 2**30:.2f} GiB"
                yield Proposal(keep_over_loops(base, now.plan, environment), decision)
        kept = list(_over_microbatches(base, now, environment, free_bytes))
        yield from kept or _at_the_turn(base, now, environment, pairs, free_bytes)


def _over_microbatches(base: Program, now: Trial, environment: Environment, free_bytes: int) -> Iterator[Proposal]:
    """Some parameters of every layer gathered once for all microbatches."""
    repeated = [loop for loop in _layer_loops(now) if loop.executions > 1]
    forward = [loop for loop in repeated if not loop.trip.reduced_bytes]
    backward = [loop for loop in repeated if loop.trip.reduced_bytes]
    waiting_bytes = max(_waiting_bytes(forward), _waiting_bytes(backward))

    def keeping(stacks: Sequence[Stack]) -> Plan:
        plan = now.plan.replace(stacks=with_gathers(now.plan.stacks, stacks))
        return keep_over_loops(base, plan, environment)

    stacks = repeated_stacks(base, now.plan.stacks)
    for chosen in _most_and_enough(stacks, free_bytes, waiting_bytes):
        yield _or_less(keeping, stacks, chosen)


def _at_the_turn(
    base: Program, now: Trial, environment: Environment, pairs: list[tuple[Loop, Loop]], free_bytes: int
) -> Iterator[Proposal]:
    """Some parameters of every layer handed over from forward to backward; where none are left to, whole layers."""
    waiting_bytes = _waiting_bytes(loop for loop in _layer_loops(now) if loop.trip.reduced_bytes)
    if not waiting_bytes:
        return

    def keeping(stacks: Sequence[Stack]) -> Plan:
        return now.plan.replace(handed_over=handing_over(stacks))

    stacks = turning_stacks(base, environment, now.plan, pairs)
    turning = _most_and_enough(stacks, free_bytes, waiting_bytes)
    for chosen in turning:
        yield _or_less(keeping, stacks, chosen)
    if now.plan.loops and not turning:
        yield from _longer_turns(base, now, environment, pairs, free_bytes)


def _most_and_enough(stacks: Sequence[Stack], free_bytes: int, waiting_bytes: int) -> list[tuple[Stack, ...]]:
    """As many of ``stacks`` as fit; and, if those are fewer, as many as will do for loops not to wait.

    What is kept over microbatches is gathered before the first one, with nothing to hide under.
    """
    enough = enough_bytes(stacks, min(waiting_bytes, free_bytes))
    choices = dict.fromkeys(map(tuple, (most_bytes(stacks, free_bytes), enough)))
    return [some for some in choices if some and total_bytes(some) <= free_bytes]


def _or_less(keeping: Callable[[Sequence[Stack]], Plan], stacks: Sequence[Stack], chosen: Sequence[Stack]) -> Proposal:
    """``chosen`` of ``stacks`` kept; where buffers lie so badly that they do not fit, those that take a little less."""
    less = most_bytes(stacks, int(_SURELY * total_bytes(chosen)))
    otherwise = Proposal(keeping(less), every_layer(less)) if less else None
    return Proposal(keeping(chosen), every_layer(chosen), otherwise)


_SURELY = 0.95


def _longer_turns(
    base: Program,
    now: Trial,
    environment: Environment,
    pairs: list[tuple[Loop, Loop]],
    free_bytes: int,
) -> Iterator[Proposal]:
    """More layers gathered once at the turn from forward to backward: as many as may fit, otherwise as surely do.

    Args:
      base, now, environment: as for ``propose``.
      pairs: forward and backward loops.
      free_bytes: memory left at the peak.
    """
    per_layer = _gathered_again(base, now.plan, environment, pairs)
    surely = hoped = int(free_bytes // (_ROOM * per_layer))
    already = kept_layers(now.plan, pairs)
    turns_once = all(len(forward.path) == 1 for forward, _ in pairs)
    if turns_once and not already:
        spare_bytes = free_bytes + now.prediction.peak_bytes - _at_turn_bytes(now)
        hoped = max(surely, spare_bytes // sum(gathered_bytes(forward) for forward, _ in pairs))
    least_bytes = _worthwhile_bytes(now) if turns_once else 0
    if (hoped - surely) * per_layer < least_bytes:
        hoped = surely
    longest = max(forward.length for forward, _ in pairs)
    proposal = None
    for layers in sorted({min(already + more, longest - 1) for more in (surely, hoped)}):
        if layers > already and (layers - already) * per_layer >= least_bytes:
            plan = keep_over_loops(base, keep_layers(now.plan, pairs, layers), environment)
            decision = f"{layers} of {longest} layers stay gathered, {per_layer / 2**30:.2f} GiB each"
            proposal = Proposal(plan, decision, otherwise=proposal)
    if proposal is not None:
        yield proposal


def _at_turn_bytes(now: Trial) -> int:
    """What is in memory where layers run, forward or backward: less than the peak, if that is elsewhere."""
    memory = now.simulation.memory
    live_bytes = dict(zip(memory.names, memory.live_bytes, strict=True))
    loops = [live_bytes[loop.name] for loop in now.simulation.loops if loop.trip.gathered_bytes]
    return max(loops, default=now.prediction.peak_bytes)


def _worthwhile_bytes(now: Trial) -> float:
    """What must be gathered less to be worth trying."""
    simulation = now.simulation
    moved = simulation.gathered_bytes + simulation.reduced_bytes
    return WORTH_TRYING * now.prediction.step_s * moved / max(simulation.communication_s, 1e-12)


def _layer_loops(now: Trial) -> list[SimulatedLoop]:
    return [loop for loop in now.simulation.loops if loop.is_innermost and loop.trip.gathered_bytes]


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
    program = apply_loops(base, environment.mesh, plan.replace(loops=()))
    return sum(gathered_bytes(loop) for loop in find_loops(program.jaxpr) if loop.name in again)


def every_layer(stacks: Sequence[Stack]) -> str:
    """A decision to keep ``stacks`` gathered, in words."""
    size = total_bytes(stacks)
    return f"{len(stacks)} parameters of every layer stay gathered, {size / 2**30:.2f} GiB"


_ROOM = 1.25
"""What a layer kept gathered takes, over the gathered bytes: buffers lie less well."""


def _hoistable_bytes(program: Program) -> int:
    """What gathering once before the loops that gather it again and again would hold all the time."""
    held = {
        (loop.name, gather.key): gather.size_bytes
        for loop in find_loops(program.jaxpr)
        for gather in hoistable_gathers(loop.eqn)
    }
    return sum(held.values())


def gathered_bytes(loop: Loop) -> int:
    """What one iteration gathers."""
    return sum(map(size_bytes, split_body(loop.eqn).early.outputs))


def layer_stacks(program: Program, plan: Plan) -> list[tuple[Loop, Loop]]:
    """Pairs of loops, forward and backward, over the same layers: same scope, same length, opposite ways.

    Only those that gather ahead, if the plan pipelines any.
    """
    wanted = {schedule.loop for schedule in plan.loops if schedule.prefetch_layers}
    loops = [loop for loop in find_loops(program.jaxpr) if loop.name in wanted or not plan.loops]
    pairs, taken = [], set()
    for forward in loops:
        for backward in loops:
            opposite = backward.reverse != forward.reverse and backward.path[:-1] == forward.path[:-1]
            later = backward.path[-1] > forward.path[-1]
            same = backward.length == forward.length and gathered_bytes(backward) == gathered_bytes(forward)
            if opposite and later and same and forward.name not in taken and backward.name not in taken:
                pairs.append((forward, backward))
                taken |= {forward.name, backward.name}
    return pairs


def keep_layers(plan: Plan, pairs: list[tuple[Loop, Loop]], layers: int) -> Plan:
    """The last ``layers`` of every stack run apart, so that forward and backward gather them together."""
    schedules = {schedule.loop: schedule for schedule in plan.loops}
    for forward, backward in pairs:
        count = min(layers, forward.length)
        ahead, behind = schedules[forward.name], schedules[backward.name]
        schedules[forward.name] = LoopSchedule(
            forward.name,
            ahead.prefetch_layers,
            ahead.delay_layers,
            ahead.first_layers,
            max(ahead.last_layers, count + ahead.prefetch_layers),
        )
        schedules[backward.name] = LoopSchedule(
            backward.name,
            behind.prefetch_layers,
            behind.delay_layers,
            max(behind.first_layers, count),
            behind.last_layers,
        )
    return plan.replace(loops=tuple(schedules[schedule.loop] for schedule in plan.loops))


def kept_layers(plan: Plan, pairs: list[tuple[Loop, Loop]]) -> int:
    """How many layers ``plan`` already runs apart at the turn from forward to backward, and so keeps gathered."""
    schedules = {schedule.loop: schedule for schedule in plan.loops}
    return min(
        min(
            schedules[forward.name].last_layers - schedules[forward.name].prefetch_layers,
            schedules[backward.name].first_layers,
        )
        for forward, backward in pairs
    )


def keep_over_loops(base: Program, plan: Plan, environment: Environment) -> Plan:
    """Everything that the loops around the layer loops gather alike in every iteration is gathered once."""
    program = apply_loops(base, environment.mesh, plan)
    return plan.replace(kept=keep_gathered(program, math.inf).kept)
