"""The last compilations: XLA is given the simulated times to schedule by, in several ways, and the best is taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import strictly_limited, two_collectives
from jax_deepcompile.planner.candidate import WORTH_TRYING, Candidate, Environment, compiled, evaluate
from jax_deepcompile.planner.journal import AS_COMPILED, Evaluated, Journal, step_s
from jax_deepcompile.planner.other_networks import best_on_average
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.scheduler_latencies import scheduler_latencies
from jax_deepcompile.planner.strategy import Proposal
from jax_deepcompile.runtime.parallel import results_of

_LAST = 3
"""How many of the candidates that were accepted last may be scheduled."""

_MISSED = 0.02
"""The share of a step by which schedules usually miss what is attainable."""

_LESS = 0.95
"""Of what collectives take: what the scheduler is told where all of it finds no room."""

_LONGER = 1.5
"""Of what collectives take: what the scheduler is told at last."""


@dataclass(frozen=True)
class Schedules:
    """Schedules of what was accepted.

    Attributes:
      base: the fully sharded program.
      environment: what it is for.
      journal: of all that was evaluated, and is evaluated here.
    """

    base: Program
    environment: Environment
    journal: Journal

    def best(self, accepted: Sequence[Candidate]) -> Candidate:
        """Where a step takes longer than it must: compiled again, with XLA given the simulated times to schedule by.

        A schedule that hides more may need more memory: if it needs too much, XLA is held to the limit more strictly.
        If it fits but does not hide what it might, others are evaluated. Where a plan that was accepted before the last
        one may still be faster, or the best of those that were rejected, it is scheduled in the same way.
        """
        fits, expected_s, last = self.environment.fits, self.environment.expected_s, accepted[-1]
        best = min(filter(fits, accepted), key=step_s, default=last)
        if self.environment.platform != "cuda" or not last.is_delayed:
            return best
        for candidate in reversed(accepted[-_LAST:]):
            if candidate is last or not fits(best) or (1 + _MISSED) * expected_s(candidate) < step_s(best):
                best = self._better(candidate, best)
        other = self._fastest_rejected(accepted)
        if other is None or (fits(best) and expected_s(other) > (1 - WORTH_TRYING) * step_s(best)):
            return best
        return self._better(other, best)

    def closed(self, name: str, proposals: Iterable[Proposal], now: Candidate) -> Candidate:
        """The best of ``now`` and of what the closing strategy ``name`` proposes, once that is scheduled."""
        evaluated = results_of(
            partial(Evaluated.of, each.decision, partial(self._carried_out, each.plan)) for each in proposals
        )
        return self.journal.best(name, now, evaluated, AS_COMPILED)

    def steadied(self, best: Candidate) -> Candidate:
        """``best``, or the same scheduled as if collectives took longer, if that is worth more on other networks.

        Where communication takes longer than compute there is none to spare for that.
        """
        is_bound = best.prediction.communication_s >= best.prediction.compute_s
        if not best.plan.latencies or not self.environment.fits(best) or is_bound:
            return best
        at_a_time = 2 if two_collectives().items() <= dict(best.plan.options).items() else 1
        longer = scheduler_latencies(best.simulation, at_a_time, _LONGER)
        decision = f"as if collectives took {_LONGER:g} times as long"
        evaluated = self._scheduled(best.plan.replace(latencies=longer), decision, best)
        return best_on_average(self.environment, self.journal, "schedule", best, [evaluated], AS_COMPILED)

    def elsewhere(self, candidate: Candidate, best: Candidate) -> Candidate:
        """``best``, or ``candidate`` once it is scheduled, likewise."""
        evaluated, of = self._with_latencies(candidate), (self.environment, self.journal)
        return best_on_average(*of, "schedule", best, evaluated, AS_COMPILED, of=candidate)

    def _fastest_rejected(self, accepted: Sequence[Candidate]) -> Candidate | None:
        """Of what fits and was rejected the one that is expected to be fastest: what was rather taken may miss that."""
        plans = {each.plan for each in accepted}
        rejected = [each for each in self.journal.fitting if each.plan not in plans and not each.plan.latencies]
        return min(rejected, key=self.environment.expected_s, default=None)

    def _better(self, candidate: Candidate, best: Candidate) -> Candidate:
        """The better of ``best`` and ``candidate`` with XLA given the times to schedule it by."""
        return self.journal.best("schedule", best, self._with_latencies(candidate), AS_COMPILED, of=candidate)

    def _with_latencies(self, candidate: Candidate) -> list[Evaluated]:
        """``candidate`` with XLA given the times to schedule it by, in one way or several."""
        fits, expected_s = self.environment.fits, (1 + _MISSED) * self.environment.expected_s(candidate)
        plan = candidate.plan.replace(latencies=scheduler_latencies(candidate.simulation))
        evaluated = [self._scheduled(plan, "scheduler latencies", candidate)]
        scheduled, strict = evaluated[0].candidate, plan.replace(options=strictly_limited(dict(plan.options)))
        if scheduled is not None and not fits(scheduled) and strict != plan:
            evaluated.append(self._scheduled(strict, "and held to the limit", candidate))
        elif scheduled is not None and fits(scheduled) and step_s(scheduled) > expected_s:
            evaluated += self._otherwise(plan, candidate)
        return evaluated

    def _otherwise(self, plan: Plan, candidate: Candidate) -> list[Evaluated]:
        """Other schedules of ``candidate``, where the latencies of ``plan`` made none that hides enough.

        With two collectives in flight at a time the network is not idle until compute comes to where the next one
        starts; simulated, they follow one another. With a little less said of each, all may find room in a loop that
        has just as much compute as communication.
        """
        options, simulation = dict(plan.options) | two_collectives(), candidate.simulation
        two = plan.replace(options=options, latencies=scheduler_latencies(simulation, at_a_time=2))
        less = plan.replace(latencies=scheduler_latencies(simulation, scale=_LESS))
        others = {"and two collectives at a time": two, "a little less of collectives": less}
        return results_of(partial(self._scheduled, other, said, candidate) for said, other in others.items())

    def _scheduled(self, plan: Plan, decision: str, candidate: Candidate) -> Evaluated:
        lowered = candidate.evaluated.lowered
        return Evaluated.of(decision, partial(compiled, candidate.program, lowered, plan, self.environment))

    def _carried_out(self, plan: Plan) -> Candidate:
        """``plan`` carried out, and scheduled by what that takes."""
        candidate = evaluate(self.base, plan.replace(latencies=()), self.environment)
        if self.environment.platform != "cuda" or not candidate.waits:
            return candidate
        plan = candidate.plan.replace(latencies=scheduler_latencies(candidate.simulation))
        return compiled(candidate.program, candidate.evaluated.lowered, plan, self.environment)
