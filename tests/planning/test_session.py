"""One plan for all processes of a run, and what a plan in the cache is found by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import pytest

from jax_deepcompile import errors
from jax_deepcompile.cache import PlanCache, PlanCacheWarning
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.devices import machine_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.passes.hand_over import HandOver
from jax_deepcompile.planning import session
from jax_deepcompile.planning.plan import Plan, Prediction
from jax_deepcompile.planning.proposals import BucketCollectives, PipelineLoops
from jax_deepcompile.planning.trials import Environment
from tests.passes.programs import sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.cpu_mesh

MARK = "f" * 32
PLAN = Plan(MARK, prediction=Prediction(1.0, 1.0, 0.0, 0.0, 100))


@dataclass
class Run:
    """A run of two processes of which one is looked at.

    Attributes:
      sent: what it broadcast.
    """

    program: object
    environment: Environment
    sent: list[str]

    def plan(self, cache: PlanCache | None = None) -> tuple[Plan, str]:
        planned = session._agreed(self.program, self.environment, MARK, (), cache)  # pyright: ignore
        return planned.plan, planned.origin


@pytest.fixture
def run(monkeypatch):
    def of(process: int, marks=(MARK, MARK), received: str = "", makes: Plan | Exception = PLAN, limit=None) -> Run:
        program, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})
        sent: list[str] = []

        def broadcast(text: str) -> str:
            sent.append(text)
            return text if process == 0 else received

        def make_plan(*_):
            if isinstance(makes, Exception):
                raise makes
            return SimpleNamespace(plan=makes, program=program)

        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: process)
        monkeypatch.setattr(session, "_gathered", lambda mark: list(marks))
        monkeypatch.setattr(session, "_broadcast", broadcast)
        monkeypatch.setattr(session, "make_plan", make_plan)
        return Run(program, Environment(mesh, "cpu", CostModel(), limit), sent)

    return of


def test_the_first_process_plans_and_the_others_take_its_plan(run):
    first = run(0)
    assert first.plan() == (PLAN, "made for this run")
    assert run(1, received=first.sent[0], makes=AssertionError("it planned")).plan() == (PLAN, "made for this run")


def test_what_fails_there_fails_everywhere(run):
    first = run(0, makes=errors.MemoryExceededError("step", 200 << 30, 100 << 30, 1 << 30))
    with pytest.raises(errors.MemoryExceededError):
        first.plan()
    with pytest.raises(errors.PlanningFailedError, match="failed there: MemoryExceededError: step takes"):
        run(1, received=first.sent[0]).plan()


@pytest.mark.parametrize("process", [0, 1])
def test_different_programs_are_refused_whatever_is_cached(run, tmp_path, process: int):
    cache = PlanCache(tmp_path)
    cache.store(PLAN)
    with pytest.raises(errors.PlanMismatchError, match="process 0: a, process 1: b"):
        run(process, marks=("a", "b")).plan(cache)


def test_a_plan_that_only_the_first_process_kept_serves_all(run, tmp_path):
    cache = PlanCache(tmp_path)
    cache.store(PLAN)
    first = run(0, makes=AssertionError("it planned"))
    assert first.plan(cache) == (PLAN, "kept from an earlier run")
    assert run(1, received=first.sent[0]).plan(PlanCache(tmp_path / "empty")) == (PLAN, "kept from an earlier run")


def test_a_kept_plan_that_does_not_fit_is_said_and_made_anew(run, tmp_path):
    cache, anew = PlanCache(tmp_path), PLAN.replace(prediction=Prediction(2.0, 2.0, 0.0, 0.0, 10))
    cache.store(PLAN)
    with pytest.warns(PlanCacheWarning, match="does not say that it fits the memory limit"):
        assert run(0, makes=anew, limit=50).plan(cache) == (anew, "made for this run")
    assert cache.load(MARK) == anew


def test_a_kept_plan_for_other_loops_is_said_and_made_anew(run, tmp_path):
    cache = PlanCache(tmp_path)
    cache.store(PLAN.replace(handed_over=(HandOver("scan.7", "scan.8", (0,)),)))
    with pytest.warns(PlanCacheWarning, match="scan.7"):
        assert run(0).plan(cache) == (PLAN, "made for this run")


def test_what_a_plan_is_found_by(monkeypatch):
    program, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})
    larger, _ = sharded(stack_loss, {"stack": stack_shapes(3)})
    passes, profile = (PipelineLoops(),), Profile("p", machine_of(mesh))

    def mark(program=program, limit=1 << 30, passes=passes, profile=None) -> str:
        environment = Environment(mesh, "cpu", CostModel(), limit)
        return session._fingerprint(program, environment, passes, profile)  # pyright: ignore

    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    flagged = mark()
    monkeypatch.delenv("XLA_FLAGS")
    others = [flagged, mark(larger), mark(limit=2 << 30), mark(passes=(BucketCollectives(),)), mark(profile=profile)]
    assert mark() == mark()
    assert len({mark(), *others}) == 1 + len(others)


def test_what_is_compiled_is_kept_beside_the_plans_whatever_the_plan_is(tmp_path, monkeypatch):
    kept: list = []
    monkeypatch.setattr(session, "_keep_executables", lambda cache, mesh: kept.append(cache.directory))
    program, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})
    for wishes in (session.Wishes(), session.Wishes(plan=Plan("")), session.Wishes(passes=())):
        session.plan_program(program, mesh, "cpu", replace(wishes, cache_dir=tmp_path))
    assert kept == [tmp_path] * 3
