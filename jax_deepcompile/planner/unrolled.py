"""Unrolled layers and other code outside of loops: what is waited for, what stays gathered, when gathers start."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import first_uses
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_memory import live_bytes_of_equations, memory_of_program
from jax_deepcompile.costs.program_time import EquationTime, equation_times, ranks_per_node
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms.compute_whole import ComputedWhole
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.prefetch import Prefetch, choose_prefetches, parameter_gathers
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions
from jax_deepcompile.transforms.unshard import ReusedGathers, repeated_gathers


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


MOSTLY_LATENCY = 0.5
"""Of a gather's time: what takes no longer is small enough to be whole on every device, whatever else is in memory."""


def without_starts(base: Program, plan: Plan, environment: Environment) -> Program:
    """``base`` as all makes it that ``plan`` says but for the order of collectives outside of loops.

    What is computed whole once that order is known is not: gathers are called otherwise then.
    """
    return plan.without(Prefetch, OrderedReductions, ComputedWhole).program(base, environment.mesh)


def chosen_anew(base: Program, plan: Plan, best: Candidate, environment: Environment, slack: float = 1.25) -> Plan:
    """``plan``, whose loops are not ``best``'s, with gathers outside of loops that stay and start early as there."""
    if best.plan.of(ReusedGathers) and environment.limit_bytes is not None:
        free = free_bytes(repeats_of(base, best.plan, best, environment), best, environment)
        plan = plan.having(ReusedGathers, choose_unsharded(repeats_of(base, plan, best, environment), free))
    return starting(base, plan, best, environment, slack) if best.plan.of(Prefetch) else plan


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
