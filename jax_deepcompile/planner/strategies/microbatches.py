"""Loops over microbatches: what is gathered once for all, what is reduced late, and forward beside backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import needs
from jax_deepcompile.analysis.gathers import first_uses, hoistable_gathers, size_bytes
from jax_deepcompile.analysis.loops import Loop, find_loops, loops_in
from jax_deepcompile.analysis.work import is_anchor
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.placement import AnyMesh, MeshAxes
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner import budget
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.layers import AS_READ, keep_over_loops
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.stacks import SMALL_STACK_BYTES, repeated_stacks, without_gathers
from jax_deepcompile.planner.strategies.unrolled import exposed_seconds
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.decision import replace_loops
from jax_deepcompile.transforms.delay_reductions import DelayedReductions, find_terms, sum_names
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names
from jax_deepcompile.transforms.microbatch_loops import (
    Halves,
    MicrobatchLoop,
    find_halves,
    hidden_trip_count,
    overlapped,
)
from jax_deepcompile.transforms.prefetch import parameter_gathers
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.stack_collectives import StackCollectives


@dataclass(frozen=True)
class UnshardMicrobatches:
    """Gathers that loops repeat are done once before them, those first that are waited for longest for their bytes."""

    name: str = "unshard_microbatches"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        if environment.limit_bytes is None or best.plan.of(KeptGathers) or not best.waits:
            return
        program = best.plan.program(base, environment.mesh, until=AS_READ)
        repeats = [each for loop in find_loops(program) for each in repeats_of(program, loop, environment.costs)]
        free = budget.free_bytes(best, environment)
        choices = [
            budget.most_worth(repeats, lambda each: each.saved_s / each.size_bytes, share * free)
            for share in (1 / budget.BUFFER_OVERHEAD, 1.0)
        ]
        proposals = []
        for chosen in filter(None, choices):
            size = budget.total_bytes(chosen)
            decision = f"{len(chosen)} of {len(repeats)} values are gathered once for all microbatches"
            plan = best.plan.having(KeptGathers, as_planned(chosen))
            proposals.append(Proposal(plan, f"{decision}, {size / 2**30:.2f} GiB"))
        yield from budget.ladder(proposals)


@dataclass(frozen=True)
class Repeat:
    """A value that a loop gathers in every iteration, once or several times.

    Attributes:
      saved_s: what gathering it once saves a step.
    """

    loop: str
    gathers: tuple[str, ...]
    saved_s: float
    size_bytes: int


_HIDDEN = 0.1
"""What a second of communication is worth that nothing waits for: with less of it, more of the rest is hidden."""


def repeats_of(program: Program, loop: Loop, costs: CostModel) -> list[Repeat]:
    """What ``loop`` gathers alike in every iteration."""
    body, gathers = loop.body, hoistable_gathers(loop.eqn)
    times, names = equation_times(body, program.mesh, costs), hoistable_names(program, loop)
    places = [gather.position for gather in gathers]
    waits_s = exposed_seconds(
        times, list(zip(places, first_uses(body, [gather.result for gather in gathers]), strict=True))
    )
    positions: dict[tuple, list[int]] = {}
    for position, gather in enumerate(gathers):
        positions.setdefault(gather.key, []).append(position)

    def saved_s(position: int) -> float:
        return waits_s[position] + _HIDDEN * (times[places[position]].network_s - waits_s[position])

    return [
        Repeat(
            loop.name,
            tuple(names[position] for position in alike),
            (loop.length - 1) * sum(map(saved_s, alike)),
            gathers[alike[0]].size_bytes,
        )
        for alike in positions.values()
    ]


def as_planned(chosen: Sequence[Repeat]) -> tuple[KeptGathers, ...]:
    """What a plan says of ``chosen``."""
    names: dict[str, list[str]] = {}
    for repeat in chosen:
        names.setdefault(repeat.loop, []).extend(repeat.gathers)
    return tuple(KeptGathers(loop, tuple(kept)) for loop, kept in sorted(names.items()))


@dataclass(frozen=True)
class DelayReductions:
    """Loops over microbatches reduce in the next iteration what is ready too late in its own.

    And their first iteration runs apart where the plan keeps much gathered for all of them.

    Attributes:
      margins: how much later than expected reductions may be done for an iteration not to wait, as shares of the
        seconds that it reduces; one proposal each.
    """

    margins: tuple[float, ...] = (0.05, 0.25)
    name: str = "delay_reductions"
    stage: Stage = Stage.MAIN

    def propose(self, base: Program, best: Candidate, environment: Environment) -> Iterator[Proposal]:
        overlapped = any(each.overlap for each in best.plan.of(MicrobatchLoop))
        if best.plan.of(DelayedReductions) or overlapped or not best.waits:
            return
        program = best.plan.program(base, environment.mesh, until=DelayedReductions)
        loops = [loop for loop in find_loops(program) if loop.length > 1]
        reductions = [
            (
                loop,
                {position: name for name, position in sum_names(program, loop).items()},
                reductions_of(loop, program.mesh, environment.costs),
            )
            for loop in loops
        ]
        choices = [
            tuple(
                DelayedReductions(loop.name, tuple(names[position] for position in sums))
                for loop, names, found in reductions
                if (sums := choose_sums(found, margin))
            )
            for margin in self.margins
        ]
        for chosen in dict.fromkeys(choices):
            if chosen:
                yield Proposal(best.plan.having(DelayedReductions, chosen), _in_words(chosen))
        kept, least_s = {choice.loop for choice in best.plan.of(KeptGathers)}, WORTH_TRYING * best.prediction.step_s
        apart = [
            loop.name
            for loop in loops
            if loop.name in kept and _gathered_before_s(program, loop, environment.costs) > least_s
        ]
        if apart:
            chosen = with_first_apart(choices[-1] if choices else (), apart)
            yield Proposal(best.plan.having(DelayedReductions, chosen), _in_words(chosen))


def with_first_apart(choices: Sequence[DelayedReductions], loops: Sequence[str]) -> tuple[DelayedReductions, ...]:
    """``choices`` and, for those of ``loops`` without one, empty ones; in all ``loops`` the first iteration apart."""
    names = [choice.loop for choice in choices]
    others = [DelayedReductions(name, (), True) for name in loops if name not in names]
    return (*(replace(choice, first_apart=choice.loop in loops) for choice in choices), *others)


def _in_words(choices: Sequence[DelayedReductions]) -> str:
    count, apart = sum(len(each.sums) for each in choices), sum(each.first_apart for each in choices)
    sums = f"{count} sums over microbatches take their last term in the next one"
    return sums + f"; the first one of {apart} loops apart" * bool(apart)


def _gathered_before_s(program: Program, loop: Loop, costs: CostModel) -> float:
    """What is gathered for all iterations of ``loop``, which nothing but its first one could hide.

    For loops outside of others, without any in them: their code is there twice then.
    """
    if len(loop.path) > 1 or any(loops_in(loop.body)):
        return 0.0
    jaxpr, gathers = open_jaxpr(program.jaxpr), parameter_gathers(program)
    place = next(index for index, eqn in enumerate(jaxpr.eqns) if eqn is loop.eqn)
    times, uses = equation_times(jaxpr, program.mesh, costs), first_uses(jaxpr, [each.result for each in gathers])
    before = [times[gather.position] for gather, use in zip(gathers, uses, strict=True) if use == place]
    return sum(time.network_s for time in before)


@dataclass(frozen=True)
class Reductions:
    """What an iteration of a loop reduces.

    Attributes:
      compute_s: all that it computes.
      terms: of each sum that can wait its position in the carry, when it can be reduced, and what that takes.
      others_s: what all other reductions take.
    """

    compute_s: float
    terms: tuple[tuple[int, float, float], ...]
    others_s: float


def reductions_of(loop: Loop, mesh: MeshAxes, costs: CostModel) -> Reductions:
    """What an iteration of ``loop`` reduces, and when its products are done that this waits for."""
    body = loop.body
    times = equation_times(body, mesh, costs)
    done_s = list(accumulate((time.compute_s for time in times), initial=0.0))
    needed = dict(zip(map(id, body.eqns), needs(body.eqns, is_anchor), strict=True))
    takes_s = {id(eqn): time.network_s for eqn, time in zip(body.eqns, times, strict=True)}
    terms = []
    for position, term in find_terms(loop.eqn).items():
        ready_s = max(done_s[needed[id(eqn)].bit_length()] for eqn in term.reductions)
        terms.append((position, ready_s, sum(takes_s[id(eqn)] for eqn in term.eqns)))
    reduced_s = sum(takes_s[id(eqn)] for eqn in body.eqns if eqn.primitive.name == "reduce_scatter")
    return Reductions(done_s[-1], tuple(terms), max(reduced_s - sum(takes_s for *_, takes_s in terms), 0.0))


def choose_sums(reductions: Reductions, margin: float) -> tuple[int, ...]:
    """The fewest sums, of those ready last, without which an iteration is over soonest.

    The network begins with what was delayed and does one after the other, each when it is ready.
    """
    terms = sorted(reductions.terms, key=lambda term: term[1])
    total_s = reductions.others_s + sum(takes_s for *_, takes_s in terms)

    def over_s(delayed: int) -> float:
        kept, later = terms[: len(terms) - delayed], terms[len(terms) - delayed :]
        free_s = reductions.others_s + sum(takes_s for *_, takes_s in later)
        for _, ready_s, takes_s in kept:
            free_s = max(free_s, ready_s) + takes_s
        return max(reductions.compute_s, free_s + margin * total_s)

    fewest = min(range(len(terms) + 1), key=over_s)
    return tuple(sorted(position for position, *_ in terms[len(terms) - fewest :]))


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
