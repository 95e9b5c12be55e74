"""Loops over microbatches reduce in the next iteration what is ready too late in its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import needs
from jax_deepcompile.analysis.gathers import first_uses
from jax_deepcompile.analysis.loops import Loop, find_loops, loops_in
from jax_deepcompile.analysis.work import is_anchor
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_time import equation_times
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment
from jax_deepcompile.planner.strategy import Proposal, Stage
from jax_deepcompile.transforms.delay_reductions import DelayedReductions, find_terms, sum_names
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.prefetch import parameter_gathers


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
