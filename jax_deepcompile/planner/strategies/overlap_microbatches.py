"""Microbatches whose forward and backward passes wait at different times, side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.apply import apply_kept
from jax_deepcompile.planner.candidate import WORTH_TRYING, Environment, Trial
from jax_deepcompile.planner.contracts import loops_around
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.search import Proposal
from jax_deepcompile.planner.stacks import (
    SMALL_STACK_BYTES,
    enough_bytes,
    repeated_stacks,
    total_bytes,
    without_gathers,
)
from jax_deepcompile.planner.strategies.unshard import keep_over_loops
from jax_deepcompile.transforms.overlap_microbatches import Halves, find_halves, overlapped
from jax_deepcompile.transforms.replace_loops import replace_loops
from jax_deepcompile.transforms.uncounted_loops import uncounted


@dataclass(frozen=True)
class OverlapMicrobatches:
    """The next microbatch's forward pass beside this one's backward pass, where they wait for the network or compute.

    Each has something to do while the other waits, and for one loop over layers there is one first gather to wait for.
    Where all layers wait for the network anyway, memory is better spent on gathering less.
    """

    name: str = "overlap_microbatches"

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        around = loops_around(now.plan)
        if now.plan.overlapped or not around or _network_bound(now):
            return
        if _waits_s(now, environment) < WORTH_TRYING * now.prediction.step_s:
            return
        halves = _all_halves(apply_kept(base, environment.mesh, now.plan), environment.mesh, around)
        if not halves:
            return
        needed_bytes = sum(map(_more_bytes, halves.values()))
        plan: Plan | None = now.plan
        if environment.limit_bytes is not None:
            free_bytes = environment.limit_bytes - now.prediction.peak_bytes
            plan = _keeping_less(base, now.plan, environment, needed_bytes - free_bytes)
        if plan is not None:
            decision = f"in {', '.join(halves)} the next forward pass beside backward, {needed_bytes / 2**30:.2f} GiB"
            yield Proposal(plan.replace(overlapped=tuple(halves)), decision)


def _all_halves(program: Program, mesh: AnyMesh, around: Collection[str]) -> dict[str, Halves]:
    """The halves of the loops ``around`` pipelined ones, as they are when the loops inside of them run as planned."""
    found: dict[str, Halves] = {}
    for name in sorted(around, key=lambda name: -name.count("/")):
        inside = [other for other in around if other.startswith(f"{name}/")]
        ways = {other: overlapped if other in found else uncounted for other in inside}
        loops = find_loops(replace_loops(program, mesh, ways).jaxpr)
        halves = find_halves(next(loop.eqn for loop in loops if loop.name == name))
        if halves is not None:
            found[name] = halves
    return found


def _network_bound(now: Trial) -> bool:
    """Whether every layer takes the network longer than it computes."""
    trips = [loop.trip for loop in now.simulation.loops if loop.is_innermost and loop.trip.gathered_bytes]
    return all(trip.communication_s > trip.compute_s for trip in trips)


def _waits_s(now: Trial, environment: Environment) -> float:
    """What neither compute nor the network is needed for: the most that can be gained."""
    return environment.expected_s(now) - max(now.prediction.compute_s, now.prediction.communication_s)


def _more_bytes(halves: Halves) -> int:
    """What is there beside backward: all that forward hands over, and what it works with, for a layer and the next."""
    working = set(halves.forward.outvars) - set(halves.handed)
    return halves.handed_bytes + 2 * sum(map(size_bytes, working))


def _keeping_less(base: Program, plan: Plan, environment: Environment, missing_bytes: int) -> Plan | None:
    """``plan`` with so much less kept gathered over microbatches; None if it does not keep as much."""
    if missing_bytes <= 0:
        return plan
    kept = {(choice.loop, index) for choice in plan.stacks for index in choice.gathers}
    stacks = [stack for stack in repeated_stacks(base, ()) if kept.issuperset(stack.gathers)]
    dropped = enough_bytes([stack for stack in stacks if stack.size_bytes > SMALL_STACK_BYTES], missing_bytes)
    if total_bytes(dropped) < missing_bytes:
        return None
    return keep_over_loops(base, plan.replace(stacks=without_gathers(plan.stacks, dropped)), environment)
