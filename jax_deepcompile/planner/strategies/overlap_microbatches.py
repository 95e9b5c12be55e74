"""The next microbatch's forward pass beside this one's backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import keep_over_loops
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.stacks import SMALL_STACK_BYTES, repeated_stacks, without_gathers
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.decision import replace_loops
from jax_deepcompile.transforms.delay_reductions import DelayedReductions
from jax_deepcompile.transforms.microbatch_loops import (
    Halves,
    MicrobatchLoop,
    find_halves,
    hidden_trip_count,
    overlapped,
)
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.stack_collectives import StackCollectives


@dataclass(frozen=True)
class OverlapMicrobatches:
    """The next microbatch's forward pass beside this one's backward pass, where they wait for the network or compute.

    Each has something to do while the other waits, and for one loop over layers there is one first gather to wait for.
    Where all layers wait for the network anyway, memory is better spent on gathering less.
    """

    name: str = "overlap_microbatches"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        loops = best.plan.of(MicrobatchLoop)
        if any(each.overlap for each in loops) or not loops or _network_bound(best):
            return
        if _waits_s(best, environment) < WORTH_TRYING * best.prediction.step_s:
            return
        program = best.plan.program(base, environment.mesh, until=DelayedReductions)
        halves = _all_halves(program, environment.mesh, {each.loop for each in loops})
        if not halves:
            return
        needed_bytes = sum(map(_more_bytes, halves.values()))
        plan: Plan | None = best.plan
        if environment.limit_bytes is not None:
            free_bytes = budget.free_bytes(best, environment)
            plan = _keeping_less(base, best.plan, environment, needed_bytes - free_bytes)
        if plan is not None:
            decision = f"in {', '.join(halves)} the next forward pass beside backward, {needed_bytes / 2**30:.2f} GiB"
            running = [replace(each, overlap=each.loop in halves) for each in loops]
            yield Proposal(plan.having(MicrobatchLoop, running), decision)


def _all_halves(program: Program, mesh: AnyMesh, around: Collection[str]) -> dict[str, Halves]:
    """The halves of the loops ``around`` pipelined ones, as they are when the loops inside of them run as planned."""
    found: dict[str, Halves] = {}
    outer = [loop for loop in find_loops(program) if loop.name in around]
    for each in sorted(outer, key=lambda loop: -len(loop.path)):
        inside = [other.name for other in outer if other.is_inside(each)]
        ways = {other: overlapped if other in found else hidden_trip_count for other in inside}
        loops = find_loops(replace_loops(program, mesh, ways))
        halves = find_halves(next(loop.eqn for loop in loops if loop.name == each.name))
        if halves is not None:
            found[each.name] = halves
    return found


def _network_bound(best: Candidate) -> bool:
    """Whether every layer takes the network longer than it computes."""
    trips = [loop.trip for loop in best.simulation.loops if loop.is_innermost and loop.trip.gathered_bytes]
    return all(trip.communication_s > trip.compute_s for trip in trips)


def _waits_s(best: Candidate, environment: Environment) -> float:
    """What neither compute nor the network is needed for: the most that can be gained."""
    return environment.expected_s(best) - max(best.prediction.compute_s, best.prediction.communication_s)


def _more_bytes(halves: Halves) -> int:
    """What is there beside backward: all that forward saves, and what it works with, for a layer and the next."""
    working = set(halves.forward.outvars) - set(halves.saved)
    return halves.saved_bytes + 2 * sum(map(size_bytes, working))


def _keeping_less(base: Program, plan: Plan, environment: Environment, missing_bytes: int) -> Plan | None:
    """``plan`` with so much less kept gathered over microbatches; None if it does not keep as much."""
    if missing_bytes <= 0:
        return plan
    stacked = plan.of(StackCollectives)
    kept = {(choice.loop, name) for choice in stacked for name in choice.gathers}
    program = plan.program(base, environment.mesh, until=Rematerialized)
    stacks = [stack for stack in repeated_stacks(program, ()) if kept.issuperset(stack.gathers)]
    dropped = budget.enough_bytes([stack for stack in stacks if stack.size_bytes > SMALL_STACK_BYTES], missing_bytes)
    if budget.total_bytes(dropped) < missing_bytes:
        return None
    return keep_over_loops(base, plan.having(StackCollectives, without_gathers(stacked, dropped)), environment)
