"""What the passes on straight-line code propose: for layers that are unrolled, beside those in loops or all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import first_uses
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_memory import live_bytes_of_equations, memory_of_program
from jax_deepcompile.costs.program_time import EquationTime, equation_times
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.apply import apply_plan
from jax_deepcompile.planner.candidate import WORTH_TRYING, Environment, Trial
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.search import Proposal
from jax_deepcompile.planner.strategies.pipeline_loops import bandwidth_bound_bytes
from jax_deepcompile.transforms.prefetch import choose_prefetches, parameter_gathers
from jax_deepcompile.transforms.reduce_in_order import reduce_in_order
from jax_deepcompile.transforms.unshard import regathers


@dataclass(frozen=True)
class PrefetchGathers:
    """Every straight-line gather starts just early enough to be hidden, but not before memory has room for it.

    Attributes:
      slacks: how early, in times of what the gather takes; one proposal each.
      fewest: gathers that are worth it.
    """

    slacks: tuple[float, ...] = (1.25, 2.0)
    fewest: int = 8
    name: str = "prefetch"

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        if not _waits(base, now):
            return
        program = _without_starts(base, now.plan, environment)
        gathers = len(parameter_gathers(program))
        if gathers < self.fewest:
            return
        room = room_bytes(program, now, environment)
        less = None if room is None else [size - _UNSURE * (environment.limit_bytes or 0) for size in room]
        for slack in self.slacks:
            early, later = (choose_prefetches(program, environment.costs, slack, each) for each in (room, less))
            decision = f"of {gathers} gathers start {slack:g} times their duration ahead"
            modest = Proposal(now.plan.replace(prefetches=later), f"{len(later)} {decision}, with room to spare")
            if early:
                plan = now.plan.replace(prefetches=early)
                yield Proposal(plan, f"{len(early)} {decision}", otherwise=modest if later != early else None)


_UNSURE = 0.03
"""The share of memory by which a program may need more than the liveness of its values tells."""


@dataclass(frozen=True)
class UnshardStraightLine:
    """Gathers that the backward pass would repeat, and wait for, stay from the forward where memory holds them."""

    slack: float = 1.25
    name: str = "unshard_straight_line"

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or not _waits(base, now):
            return
        repeats = _repeats(base, now.plan, environment)
        plan = now.plan.replace(unsharded=choose_unsharded(repeats, _free_bytes(repeats, now, environment)))
        if not plan.unsharded:
            return
        if now.plan.prefetches:
            plan = _starting(base, plan, now, environment, self.slack)
        size = sum(repeat.size_bytes for repeat in repeats if repeat.position in plan.unsharded)
        yield Proposal(plan, f"{len(plan.unsharded)} of {len(repeats)} repeated gathers stay, {size / 2**30:.2f} GiB")


@dataclass(frozen=True)
class ReduceInOrder:
    """Reductions outside of layer loops follow one another in the order in which gradients are ready.

    Attributes:
      latency_share: of the time of reductions that go together.
    """

    latency_share: float = 0.3
    name: str = "reduce_in_order"

    def propose(self, base: Program, now: Trial, environment: Environment) -> Iterator[Proposal]:
        if not _waits(base, now):
            return
        size = bandwidth_bound_bytes(base, environment, self.latency_share)
        program = apply_plan(base, environment.mesh, now.plan)
        if reduce_in_order(program, size, in_loops=not now.plan.loops) is not program:
            plan = now.plan.replace(reduction_bucket_bytes=size)
            yield Proposal(plan, f"reductions follow one another, {size / 2**20:.0f} MiB at a time")


def chosen_anew(base: Program, plan: Plan, now: Trial, environment: Environment, slack: float = 1.25) -> Plan:
    """``plan``, whose loops are not ``now``'s, with straight-line gathers that stay and start early as there."""
    if now.plan.unsharded and environment.limit_bytes is not None:
        free_bytes = _free_bytes(_repeats(base, now.plan, environment), now, environment)
        plan = plan.replace(unsharded=choose_unsharded(_repeats(base, plan, environment), free_bytes))
    return _starting(base, plan, now, environment, slack) if now.plan.prefetches else plan


def _waits(base: Program, now: Trial) -> bool:
    """Whether layers outside of loops are waited for long enough for another compilation.

    The passes on loops see to embeddings and heads beside them.
    """
    if now.plan.loops and len(parameter_gathers(base)) < _LAYERS:
        return False
    in_loops = [loop for loop in now.simulation.loops if loop.is_innermost] if now.plan.loops else []
    in_loops_s = sum(loop.executions * loop.trip_count * loop.trip.exposed_communication_s for loop in in_loops)
    return now.prediction.exposed_s - in_loops_s >= WORTH_TRYING * now.prediction.step_s


_LAYERS = 8
"""So many gathers are of more than embeddings and heads."""


def _without_starts(base: Program, plan: Plan, environment: Environment) -> Program:
    """``base`` as all makes it that ``plan`` says but for the order of straight-line collectives."""
    return apply_plan(base, environment.mesh, plan.replace(prefetches=(), reduction_bucket_bytes=0))


def _repeats(base: Program, plan: Plan, environment: Environment) -> tuple[Repeat, ...]:
    """What could be kept from forward to backward where all else is as ``plan`` says."""
    return candidates(_without_starts(base, plan.replace(unsharded=()), environment), environment.costs)


def _free_bytes(repeats: tuple[Repeat, ...], now: Trial, environment: Environment) -> int:
    """What is left for ``repeats`` of ``now``'s program, with what is kept of them now."""
    kept_bytes = sum(repeat.size_bytes for repeat in repeats if repeat.position in now.plan.unsharded)
    return (environment.limit_bytes or 0) - now.prediction.peak_bytes + kept_bytes


def _starting(base: Program, plan: Plan, now: Trial, environment: Environment, slack: float) -> Plan:
    """``plan`` with straight-line gathers that start early enough."""
    program = _without_starts(base, plan, environment)
    room = room_bytes(program, now, environment)
    return plan.replace(prefetches=choose_prefetches(program, environment.costs, slack, room))


def room_bytes(program: Program, now: Trial, environment: Environment) -> list[float] | None:
    """What is free while each equation of ``program`` runs; None without a limit.

    What XLA takes for ``now`` beyond the liveness of its values, it is expected to take for ``program``.
    """
    if environment.limit_bytes is None:
        return None
    beyond_bytes = now.prediction.peak_bytes - memory_of_program(now.program).live_peak_bytes
    return [environment.limit_bytes - beyond_bytes - size for size in live_bytes_of_equations(program)]


@dataclass(frozen=True)
class Repeat:
    """A gather of what was gathered before.

    Attributes:
      position: among the repeated ones.
      exposed_s: waited for it.
      size_bytes: of the whole value.
      alive_s: from the first use of the first gather to the first use of this one.
    """

    position: int
    exposed_s: float
    size_bytes: int
    alive_s: float

    @property
    def worth(self) -> float:
        """Seconds saved for each byte and second that memory is held."""
        return self.exposed_s / max(self.size_bytes * self.alive_s, 1e-12)


def candidates(program: Program, costs: CostModel) -> tuple[Repeat, ...]:
    """What keeping each repeated gather from its first time would save and take."""
    jaxpr = open_jaxpr(program.jaxpr)
    pairs = regathers(jaxpr, jaxpr.invars)
    times = equation_times(jaxpr, program.mesh, costs)
    uses = first_uses(jaxpr, [gather.result for pair in pairs for gather in pair])
    waits = exposed_seconds(times, [(again.position, use) for (_, again), use in zip(pairs, uses[1::2], strict=True)])
    return tuple(
        Repeat(index, wait_s, again.size_bytes, sum(time.compute_s for time in times[first:last]))
        for index, ((_, again), wait_s, first, last) in enumerate(zip(pairs, waits, uses[::2], uses[1::2], strict=True))
    )


def exposed_seconds(times: list[EquationTime], gathers: list[tuple[int, int]]) -> list[float]:
    """How long each gather, given as where it is and where it is used, is waited for.

    It can run beside what is computed between the collective before it and its use.
    """
    collectives = [-1, *(index for index, time in enumerate(times) if time.network_s)]
    before = {index: previous for previous, index in pairwise(collectives)}
    beside = [
        sum(time.compute_s for time in times[before.get(position, position) + 1 : use]) for position, use in gathers
    ]
    return [
        max(times[position].network_s - beside_s, 0.0) for (position, _), beside_s in zip(gathers, beside, strict=True)
    ]


def choose_unsharded(repeats: tuple[Repeat, ...], free_bytes: float) -> tuple[int, ...]:
    """Positions of those that save most for what they hold, as many as ``free_bytes`` holds together."""
    chosen = []
    for repeat in sorted(repeats, key=lambda repeat: -repeat.worth):
        if repeat.exposed_s > 0 and repeat.size_bytes <= free_bytes:
            free_bytes -= repeat.size_bytes
            chosen.append(repeat.position)
    return tuple(sorted(chosen))
