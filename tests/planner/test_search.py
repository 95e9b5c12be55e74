"""The search with strategies made up for the purpose: what it accepts, what it rejects, what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import optax
import pytest

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.lowering.compile import combiner_options
from jax_deepcompile.planner import search as search_module
from jax_deepcompile.planner.candidate import Candidate, Environment, evaluate
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.search import search
from jax_deepcompile.planner.strategies import ONE_DEVICE, STRATEGIES
from jax_deepcompile.planner.strategy import Proposal, Stage, Strategy
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.reduce_in_order import OrderedReductions
from tests.planner.situations import START, Proposes, accepted, candidate, evaluate_as
from tests.transforms.programs import h100s, sharded, stack_loss, stack_shapes

BETTER, WORSE, LARGER, DEAR, LITTLE, FAILS, SAME, NEARLY = (
    START.having(OrderedReductions, [OrderedReductions(size)]) for size in range(1, 9)
)
TAKES = {
    START: (2.0, 100),
    BETTER: (1.0, 100),
    WORSE: (3.0, 50),
    LARGER: (0.5, 200),
    DEAR: (1.986, 190),
    LITTLE: (1.992, 190),
    SAME: (2.0, 100),
    NEARLY: (1.999, 100),
}
SMALL = START.replace(options=combiner_options(1, 1))
PROMISES = START.having(LoopSchedule, [LoopSchedule("layers @forward")])
TAKES |= {SMALL: (1.9975, 100), PROMISES: (2.1, 100)}
HOPED_S = {PROMISES: 1.5}
"""Where it is not the step as it is compiled."""


@dataclass(frozen=True)
class ProposesLess(Proposes):
    """Proposes a plan, and others should it not fit."""

    def propose(self, base, best, environment):
        proposal = None
        for plan in reversed(self.plans):
            proposal = Proposal(plan, "try it", otherwise=proposal)
        return [proposal]


@dataclass(frozen=True)
class Opens(Proposes):
    """Proposes plans whatever the first candidate shows."""

    name: str = "opening"
    stage: Stage = Stage.OPENING

    def propose(self, base, best, environment):
        assert best == Candidate(START, base), "nothing is evaluated yet"
        return super().propose(base, best, environment)


@dataclass(frozen=True)
class Closes(Proposes):
    """Proposes the same plans when all else is decided."""

    name: str = "closing"
    stage: Stage = Stage.CLOSING

    def propose(self, base, best, environment):
        return [Proposal(plan, f"after {best.prediction.step_s:g} s") for plan in self.plans]


@pytest.fixture
def try_strategies(monkeypatch) -> Callable[..., Candidate]:
    """Runs passes on plans whose figures are given, with nothing compiled."""
    program, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})

    def made_up(base, plan, environment):
        step_s, peak = TAKES[plan]
        memory = SimpleNamespace(peak_values=((7 << 20, "fusion.1"), (3 << 20, "copy.2"), (2 << 20, "fusion.3")))
        simulation = SimpleNamespace(attainable_s=HOPED_S.get(plan, step_s), memory=memory)
        module = SimpleNamespace(source_of=lambda name: "step.py:40" if "fusion" in name else "")
        return candidate(base, plan, Prediction(step_s, step_s, 0.0, 0.0, peak, step_s), simulation, module)

    def run(*strategies, limit=None, start=START) -> Candidate:
        return search(program, Environment(mesh, "cuda", CostModel(), limit), strategies, start)

    evaluate_as(monkeypatch, made_up)
    return run


def decided(best: Candidate) -> Plan:
    return best.plan.replace(prediction=None, records=())


@pytest.mark.pure
def test_what_gains_is_kept(try_strategies):
    best = try_strategies(Proposes((BETTER,)))
    assert decided(best) == BETTER
    assert best.plan.prediction == best.prediction == Prediction(1.0, 1.0, 0.0, 0.0, 100, 1.0)
    (record,) = best.plan.records
    assert (record.accepted, record.reason) == (True, "2 s to 1 s")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("plan", "reason"), [(SAME, "no faster: 2 s as before"), (NEARLY, "hardly faster: 1.999 s against 2 s")]
)
def test_what_gains_nothing_is_left(try_strategies, plan, reason):
    best = try_strategies(Proposes((plan,)))
    assert (decided(best), best.plan.records[0].reason) == (START, reason)


@pytest.mark.pure
def test_what_is_worse_is_taken_back_and_reported(try_strategies):
    best = try_strategies(Proposes((WORSE,)))
    assert decided(best) == START
    (record,) = best.plan.records
    assert (record.accepted, record.reason) == (False, "no faster: 3 s against 2 s")
    assert record.before.step_s == 2.0
    assert record.after is not None
    assert record.after.step_s == 3.0


@pytest.mark.pure
def test_what_is_over_the_limit_is_left_however_fast(try_strategies):
    best = try_strategies(Proposes((LARGER, BETTER)), limit=150)
    assert decided(best) == BETTER
    assert [record.accepted for record in best.plan.records] == [False, True]
    assert best.plan.records[0].reason == "takes 200 bytes, 50 bytes more than the limit"
    assert decided(try_strategies(Proposes((LARGER, BETTER)))) == LARGER


@pytest.mark.pure
@pytest.mark.parametrize("stage", [Stage.MAIN, Stage.CLOSING])
def test_what_cannot_even_be_proposed_is_left_and_reported_and_what_can_is_tried(try_strategies, stage):
    class Deepens(Closes):
        def propose(self, base, best, environment):
            yield Proposal(BETTER, "better")
            raise errors.PlanError("the plan", "no iterations are left in layers")

    best = try_strategies(Deepens((), stage=stage))
    assert decided(best) == BETTER
    record = best.plan.records[0]
    assert (record.accepted, record.after) == (False, None)
    assert record.reason.startswith("could not be proposed: the plan cannot be used: no iterations are left in layers")


@pytest.mark.pure
@pytest.mark.parametrize(
    "failure",
    [
        jax.errors.JaxRuntimeError("INTERNAL: no tile sizes\nat: here"),
        errors.InvariantError(3, "types", "x"),
        errors.PlanError("the plan", "no iterations are left in layers"),
    ],
)
def test_what_cannot_be_compiled_is_left_and_reported(monkeypatch, try_strategies, failure: Exception):
    made_up = search_module.evaluate

    def evaluateed(base, plan, environment):
        if plan == FAILS:
            raise failure
        return made_up(base, plan, environment)

    evaluate_as(monkeypatch, evaluateed)
    best = try_strategies(Proposes((FAILS, BETTER)))
    assert decided(best) == BETTER
    failed, accepted = best.plan.records
    assert (failed.accepted, failed.after, accepted.accepted) == (False, None, True)
    assert failed.reason == f"could not be compiled: {str(failure).splitlines()[0]}"
    with pytest.raises(type(failure)):
        try_strategies(Proposes((BETTER,)), start=FAILS)


@pytest.mark.pure
def test_what_does_not_fit_gives_way_to_what_is_more_modest(try_strategies):
    best = try_strategies(ProposesLess((LARGER, BETTER, WORSE)), limit=150)
    assert decided(best) == BETTER
    assert [record.accepted for record in best.plan.records[:2]] == [False, True]
    assert all(record.reason != "2 s to 3 s" for record in best.plan.records)


@pytest.mark.pure
def test_what_is_more_modest_is_not_tried_if_all_fits(try_strategies):
    (record,) = try_strategies(ProposesLess((LARGER, BETTER))).plan.records
    assert (record.accepted, record.reason) == (True, "2 s to 0.5 s")


@pytest.mark.pure
def test_what_fits_replaces_what_does_not_however_slow(try_strategies):
    best = try_strategies(Proposes((BETTER, WORSE)), limit=60)
    assert decided(best) == WORSE
    assert best.prediction.peak_bytes <= 60


@pytest.mark.pure
def test_what_does_not_fit_at_all_is_an_error(try_strategies):
    with pytest.raises(
        errors.MemoryExceededError, match=r"step takes .* bytes a device, .* more than the limit of"
    ) as it:
        try_strategies(Proposes((WORSE, BETTER)), limit=20)
    assert "(most of all 9.00 MiB of step.py:40, 3.00 MiB of copy.2)" in str(it.value)


@pytest.mark.pure
def test_what_is_found_with_more_of_the_hosts_memory_and_needs_none_is_taken(try_strategies):
    @dataclass(frozen=True)
    class AsksForMore(Proposes):
        def propose(self, base, best, environment):
            return super().propose(base, best, environment) if environment.host_bytes else []

    best = try_strategies(AsksForMore((LARGER, WORSE)), limit=60)
    assert decided(best) == WORSE
    assert [record.accepted for record in best.plan.records] == [False, True]


@pytest.mark.pure
def test_closing_strategies_come_last_and_are_judged_by_the_step(try_strategies):
    best = try_strategies(Closes((LARGER, WORSE)), Proposes((BETTER,)))
    assert decided(best) == LARGER
    told = [(record.strategy, record.decision, record.accepted, record.reason) for record in best.plan.records]
    assert told == [
        ("fake", "try it", True, "2 s to 1 s"),
        ("closing", "after 1 s", True, "1 s to 0.5 s"),
        ("closing", "after 1 s", False, "no faster: 3 s against 0.5 s"),
    ]
    assert decided(try_strategies(Closes((LARGER,)), Proposes((BETTER,)), limit=150)) == BETTER
    assert decided(try_strategies(Closes(()), Proposes((BETTER,)))) == BETTER


@pytest.mark.pure
def test_memory_is_spent_on_little_once_nothing_else_needs_it(try_strategies):
    """What saves 0.7 % of a step and takes 90 of the last 100 bytes waits for those who can do more with them."""
    best = try_strategies(Proposes((DEAR,)), limit=200)
    assert decided(best) == DEAR
    (record,) = best.plan.records
    assert (record.accepted, record.reason) == (True, "2 s to 1.986 s, in memory that nothing else needs")
    best = try_strategies(Proposes((DEAR,)), Proposes((BETTER,), name="better"), limit=200)
    assert decided(best) == BETTER
    assert best.plan.records[0].reason == "for 190 bytes hardly faster: 1.986 s against 2 s"
    assert decided(try_strategies(Proposes((DEAR,)), limit=150)) == START
    assert decided(try_strategies(Proposes((LITTLE,)), limit=200)) == START


@pytest.mark.pure
def test_what_is_accepted_is_what_led_to_the_plan(try_strategies):
    best = try_strategies(Closes((LARGER,)), Opens((DEAR,)), Proposes((BETTER, WORSE)))
    assert accepted(best.plan) == ["opening", "fake", "closing"]
    assert accepted(try_strategies(Proposes((WORSE,))).plan) == []


@pytest.mark.pure
def test_what_the_best_of_what_was_left_is_without_is_not_accepted(try_strategies):
    best = try_strategies(Proposes((DEAR,), "dear"), Proposes((SMALL,), "small"), limit=200)
    assert decided(best) == DEAR
    assert accepted(best.plan) == ["dear"]
    assert best.plan.records[1].reason == "2 s to 1.998 s, but a plan without it came out better"


@pytest.mark.pure
def test_a_promise_that_the_schedule_did_not_keep_is_not_accepted(try_strategies):
    best = try_strategies(Proposes((PROMISES,)))
    assert decided(best) == START
    assert accepted(best.plan) == []
    assert (
        best.plan.records[0].reason
        == "2 s to 2.1 s (2 s to 1.5 s once scheduled), but a plan without it came out better"
    )


@pytest.mark.pure
def test_two_openings_are_changes_of_the_same_plan(try_strategies):
    best = try_strategies(Opens((BETTER,), "first"), Opens((LARGER,), "second"))
    assert decided(best) == LARGER
    assert accepted(best.plan) == ["second"]


@pytest.mark.pure
def test_no_plan_is_tried_twice(try_strategies):
    assert try_strategies(Proposes((START,))).plan.records == ()
    assert try_strategies().plan.records == ()
    best = try_strategies(Proposes((WORSE,)), Proposes((BETTER, WORSE), "again"))
    assert [(record.strategy, record.accepted) for record in best.plan.records] == [("fake", False), ("again", True)]


@pytest.mark.pure
def test_openings_are_tried_before_all_else(try_strategies):
    best = try_strategies(Proposes((LARGER,)), Opens((BETTER,)))
    assert [(record.strategy, record.reason) for record in best.plan.records] == [
        ("opening", "2 s to 1 s"),
        ("fake", "1 s to 0.5 s"),
    ]
    assert decided(try_strategies(Opens((WORSE,)))) == decided(try_strategies(Opens((START,)))) == START


@pytest.fixture(scope="module")
def compiled():
    """Four layers on 8 H100s, compiled for real."""
    program, mesh = sharded(stack_loss, {"stack": stack_shapes(4)}, mesh=h100s(), optimizer=optax.sgd(0.1))
    environment = Environment(mesh, "cuda", CostModel(), None)
    return program, environment, evaluate(program, START, environment)


@pytest.mark.h100_aot
def test_the_limit_is_held_against_what_the_compiler_says(compiled):
    program, environment, base = compiled
    peak = base.prediction.peak_bytes
    assert base.evaluated.argument_bytes < peak
    fits = search(program, replace(environment, limit_bytes=peak), (), START)
    assert fits.prediction.peak_bytes <= peak
    with pytest.raises(
        errors.MemoryExceededError, match=r"microbatches=k .*jax\.checkpoint.* or raise memory_limit"
    ) as it:
        search(program, replace(environment, limit_bytes=base.evaluated.argument_bytes), (), START)
    assert "programs.py:" in str(it.value)


@pytest.mark.h100_aot
def test_a_proposal_that_slows_the_real_step_is_taken_back(compiled):
    program, environment, base = compiled
    apart = START.replace(options=combiner_options(0, 0))
    best = search(program, environment, (Proposes((apart,)),), START)
    assert best.prediction.step_s <= base.prediction.step_s
    (record,) = best.plan.records[:1]
    assert record.accepted == (record.after is not None and record.after.step_s < record.before.step_s)


@pytest.mark.pure
def test_strategies_are_all_of_one_protocol_and_have_a_name_each():
    assert all(isinstance(each, Strategy) for each in (*STRATEGIES, *ONE_DEVICE, Proposes(())))
    assert len({each.name for each in STRATEGIES}) == len({type(each) for each in STRATEGIES})
    assert [each.stage for each in STRATEGIES] == sorted((each.stage for each in STRATEGIES), key=list(Stage).index)
