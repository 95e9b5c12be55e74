"""Unrolled layers and other code outside of loops: buckets, gathers that stay or start early, reductions in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import first_uses
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_memory import live_bytes_of_equations, memory_of_program
from jax_deepcompile.costs.program_time import EquationTime, equation_times, ranks_per_node
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import combiner_options
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_SPARING, WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch, choose_prefetches, parameter_gathers
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions, reduce_in_order
from jax_deepcompile.transforms.unshard import ReusedGathers, repeated_gathers


@dataclass(frozen=True)
class BucketCollectives:
    """Neighbours outside of layer loops share one collective, up to the size where its latency no longer counts.

    What is gathered again stays where all of it is sent sooner than a collective begins.
    """

    name: str = "bucket_collectives"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if best.plan.of(LoopSchedule):
            return
        size = bandwidth_bound_bytes(base, environment, _LATENCY_SHARE)
        options = dict(best.plan.options) | combiner_options(size, size // base.mesh.size)
        plan, decision = best.plan.replace(options=options), f"buckets of {size / 2**20:.0f} MiB"
        again = repeated_gathers(without_starts(base, best.plan.without(ReusedGathers), environment))
        again_bytes = sum(gather.size_bytes for _, gather in again.values())
        if again and again_bytes <= bandwidth_bound_bytes(base, environment, _MOSTLY_LATENCY):
            plan = plan.having(ReusedGathers, [ReusedGathers(tuple(again))])
            decision += f"; all {len(again)} repeated gathers stay, {again_bytes / 2**20:.2f} MiB"
        yield Proposal(plan, decision)


_LATENCY_SHARE = 0.05
"""Of a bucket's time: beyond that, joining more saves less than it delays."""

_MOSTLY_LATENCY = 0.5
"""Of a gather's time: what takes no longer is small enough to be gathered once, whatever else is in memory."""


def bandwidth_bound_bytes(program: Program, environment: Environment, latency_share: float) -> int:
    """The smallest power of two of bytes whose gather spends no more than ``latency_share`` of its time on latency."""
    costs, names = environment.costs, list(program.mesh.names)
    ranks = ranks_per_node(names, program.mesh, costs)

    def seconds(size: int) -> float:
        return costs.collective_s("all-gather", size, program.mesh.size, ranks)

    size = 1 << 20
    while seconds(1) > latency_share * seconds(size) and size < 1 << 32:
        size *= 2
    return size


@dataclass(frozen=True)
class PrefetchGathers:
    """Every gather outside of loops starts just early enough to be hidden, but not before memory has room for it.

    Attributes:
      slacks: how early, in times of what the gather takes; one proposal each.
      fewest: gathers that are worth it.
    """

    slacks: tuple[float, ...] = (1.25, 2.0)
    fewest: int = 8
    name: str = "prefetch"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if not waits(base, best):
            return
        program = without_starts(base, best.plan, environment)
        gathers = len(parameter_gathers(program))
        if gathers < self.fewest:
            return
        room = room_bytes(program, best, environment)
        less = None if room is None else [size - budget.UNFORESEEN * (environment.limit_bytes or 0) for size in room]
        for slack in self.slacks:
            early, later = (choose_prefetches(program, environment.costs, slack, each) for each in (room, less))
            decision = f"of {gathers} gathers start {slack:g} times their duration ahead"
            if early:
                yield from budget.ladder(
                    Proposal(best.plan.having(Prefetch, starts), f"{len(starts)} {decision}{said}")
                    for starts, said in ({later: ", with room to spare"} | {early: ""}).items()
                )


@dataclass(frozen=True)
class UnshardUnrolled:
    """Gathers that the backward pass would repeat, and wait for or lose kernels' time to, stay from the forward."""

    slack: float = 1.25
    name: str = "unshard_unrolled"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None:
            return
        repeats = repeats_of(base, best.plan, best, environment)
        chosen = choose_unsharded(repeats, free_bytes(repeats, best, environment))
        stay = {name for each in chosen for name in each.gathers}
        spared_s = sum(repeat.spared_s for repeat in repeats if repeat.name in stay - stays(best.plan))
        if not chosen or not (waits(base, best) or spared_s >= WORTH_SPARING * best.prediction.step_s):
            return
        plan = best.plan.having(ReusedGathers, chosen)
        if best.plan.of(Prefetch):
            plan = starting(base, plan, best, environment, self.slack)
        size = sum(repeat.size_bytes for repeat in repeats if repeat.name in stay)
        yield Proposal(plan, f"{len(stay)} of {len(repeats)} repeated gathers stay, {size / 2**30:.2f} GiB")


@dataclass(frozen=True)
class ReduceInOrder:
    """Reductions outside of layer loops follow one another in the order in which gradients are ready.

    Attributes:
      latency_share: of the time of reductions that go together.
    """

    latency_share: float = 0.3
    name: str = "reduce_in_order"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if not waits(base, best):
            return
        size = bandwidth_bound_bytes(base, environment, self.latency_share)
        program, in_loops = best.plan.program(base, environment.mesh), not best.plan.of(LoopSchedule)
        if reduce_in_order(program, size, in_loops) is not program:
            plan = best.plan.having(OrderedReductions, [OrderedReductions(size, in_loops)])
            yield Proposal(plan, f"reductions follow one another, {size / 2**20:.0f} MiB at a time")


def chosen_anew(base: Program, plan: Plan, best: Candidate, environment: Environment, slack: float = 1.25) -> Plan:
    """``plan``, whose loops are not ``best``'s, with gathers outside of loops that stay and start early as there."""
    if best.plan.of(ReusedGathers) and environment.limit_bytes is not None:
        free = free_bytes(repeats_of(base, best.plan, best, environment), best, environment)
        plan = plan.having(ReusedGathers, choose_unsharded(repeats_of(base, plan, best, environment), free))
    return starting(base, plan, best, environment, slack) if best.plan.of(Prefetch) else plan


def waits(base: Program, best: Candidate) -> bool:
    """Whether layers outside of loops are waited for long enough for another compilation.

    The passes on loops see to embeddings and heads beside them.
    """
    pipelined = best.plan.of(LoopSchedule)
    if pipelined and len(parameter_gathers(base)) < _LAYERS:
        return False
    in_loops = [loop for loop in best.simulation.loops if loop.is_innermost] if pipelined else []
    in_loops_s = sum(loop.executions * loop.trip_count * loop.trip.exposed_communication_s for loop in in_loops)
    return best.prediction.exposed_s - in_loops_s >= WORTH_TRYING * best.prediction.step_s


_LAYERS = 8
"""So many gathers are of more than embeddings and heads."""


def without_starts(base: Program, plan: Plan, environment: Environment) -> Program:
    """``base`` as all makes it that ``plan`` says but for the order of collectives outside of loops."""
    return plan.without(Prefetch, OrderedReductions).program(base, environment.mesh)


def repeats_of(base: Program, plan: Plan, best: Candidate, environment: Environment) -> tuple[Repeat, ...]:
    """What could be kept from forward to backward where all else is as ``plan`` says; kernels lose as in ``best``."""
    return candidates(without_starts(base, plan.without(ReusedGathers), environment), environment.costs, best.delay)


def stays(plan: Plan) -> set[str]:
    """The gathers that ``plan`` keeps from forward to backward."""
    return {name for each in plan.of(ReusedGathers) for name in each.gathers}


def free_bytes(repeats: tuple[Repeat, ...], best: Candidate, environment: Environment) -> int:
    """What is left for ``repeats`` of ``best``'s program, with what is kept of them now."""
    kept = sum(repeat.size_bytes for repeat in repeats if repeat.name in stays(best.plan))
    return budget.free_bytes(best, environment) + kept


def starting(base: Program, plan: Plan, best: Candidate, environment: Environment, slack: float) -> Plan:
    """``plan`` with gathers outside of loops that start early enough."""
    program = without_starts(base, plan, environment)
    room = room_bytes(program, best, environment)
    return plan.having(Prefetch, choose_prefetches(program, environment.costs, slack, room))


def room_bytes(program: Program, best: Candidate, environment: Environment) -> list[float] | None:
    """What is free while each equation of ``program`` runs; None without a limit.

    What XLA takes for ``best`` beyond the liveness of its values, it is expected to take for ``program``.
    """
    if environment.limit_bytes is None:
        return None
    beyond_bytes = best.prediction.peak_bytes - memory_of_program(best.program).live_peak_bytes
    return [environment.limit_bytes - beyond_bytes - size for size in live_bytes_of_equations(program)]


@dataclass(frozen=True)
class Repeat:
    """A gather of what was gathered before.

    Attributes:
      name: of the gather.
      exposed_s: waited for it.
      spared_s: that kernels beside it lose.
      size_bytes: of the whole value.
      alive_s: from the first use of the first gather to the first use of this one.
    """

    name: str
    exposed_s: float
    spared_s: float
    size_bytes: int
    alive_s: float

    @property
    def worth(self) -> float:
        """Seconds saved for each byte and second that memory is held."""
        return (self.exposed_s + self.spared_s) / max(self.size_bytes * self.alive_s, 1e-12)


def candidates(program: Program, costs: CostModel, delay: float) -> tuple[Repeat, ...]:
    """What keeping each repeated gather from its first time would save and take.

    Args:
      delay: see ``Candidate``.
    """
    jaxpr, named = open_jaxpr(program.jaxpr), repeated_gathers(program)
    pairs = list(named.values())
    times = equation_times(jaxpr, program.mesh, costs)
    uses = first_uses(jaxpr, [gather.result for pair in pairs for gather in pair])
    waits = exposed_seconds(times, [(again.position, use) for (_, again), use in zip(pairs, uses[1::2], strict=True)])
    return tuple(
        Repeat(
            name,
            wait_s,
            delay * times[again.position].network_s,
            again.size_bytes,
            sum(time.compute_s for time in times[first:last]),
        )
        for (name, (_, again)), wait_s, first, last in zip(named.items(), waits, uses[::2], uses[1::2], strict=True)
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


def choose_unsharded(repeats: tuple[Repeat, ...], free: float) -> tuple[ReusedGathers, ...]:
    """Those that save most for what they hold, as many as ``free`` bytes hold together; nothing if that is none."""
    chosen = {repeat.name for repeat in budget.most_worth(repeats, lambda repeat: repeat.worth, free)}
    names = tuple(repeat.name for repeat in repeats if repeat.name in chosen)
    return (ReusedGathers(names),) if names else ()
