"""One plan for all processes of a run, and what a plan in the cache is found by."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from jax_deepcompile import errors
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.devices import machine_of
from jax_deepcompile.costs.profile import Profile
from jax_deepcompile.planner import plan as plan_module
from jax_deepcompile.planner import session
from jax_deepcompile.planner.cache import PlanCache, PlanCacheWarning
from jax_deepcompile.planner.candidate import Environment
from jax_deepcompile.planner.plan import Plan, Prediction
from jax_deepcompile.planner.strategies.bucket_collectives import BucketCollectives
from jax_deepcompile.planner.strategies.pipeline_loops import PipelineLoops
from jax_deepcompile.runtime.processes import ALONE
from jax_deepcompile.transforms import TRANSFORMS
from jax_deepcompile.transforms.save_gathered import SavedGathers
from tests.together import outcomes, processes
from tests.transforms.programs import sharded, stack_loss, stack_shapes

pytestmark = pytest.mark.cpu_mesh

MARK = "f" * 32
PLAN = Plan(MARK, prediction=Prediction(1.0, 1.0, 0.0, 0.0, 100))
PLANS = AssertionError("it planned")


@pytest.fixture
def planned(monkeypatch):
    """What planning comes to in every process, each with a cache of its own or none, and with its own planner."""
    program, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})
    here = threading.local()

    def make_plan(*_):
        if isinstance(here.makes, Exception):
            raise here.makes
        return SimpleNamespace(plan=here.makes, program=program, rivals=(), way=(), evaluation=None)

    monkeypatch.setattr(session, "make_plan", make_plan)
    monkeypatch.setattr(session, "processes_of", lambda mesh: here.process)

    def of(caches=(None, None), makes=(PLAN, PLANS), marks=(MARK, MARK), limit=None) -> list:
        environment = Environment(mesh, "cpu", CostModel(), limit)

        def plan(process, cache, made, mark) -> tuple[Plan, str]:
            here.process, here.makes = process, made
            task = session._Task(program, environment, (), TRANSFORMS, mark, cache)  # pyright: ignore
            found = session._agreed(task)  # pyright: ignore
            return found.plan, found.origin

        members = processes(len(caches)) if len(caches) > 1 else [ALONE]
        return outcomes(*map(partial, [plan] * len(members), members, caches, makes, marks))

    return of


def test_the_first_process_plans_and_the_others_take_its_plan(planned):
    assert planned() == [(PLAN, "made for this run")] * 2


def test_what_fails_there_fails_everywhere(planned):
    failure = errors.MemoryExceededError("step", 200 << 30, 100 << 30, 1 << 30)
    first, second = planned(makes=(failure, PLANS))
    assert first is failure
    assert isinstance(second, errors.ProcessStoppedError)
    assert "process 0 of this run does not go on" in str(second)
    assert "Its reason: MemoryExceededError: step takes" in str(second)


def test_different_programs_are_refused_whatever_is_cached(planned, tmp_path):
    cache = PlanCache(tmp_path)
    cache.store(PLAN)
    for error in planned(caches=(cache, cache), marks=("a", "b")):
        assert isinstance(error, errors.ProcessMismatchError)
        assert re.search(r"process 0 would plan \S+ \(fingerprint a\); process 1 would plan \S+ \(", str(error))


def test_a_plan_that_only_the_first_process_kept_serves_all(planned, tmp_path):
    cache = PlanCache(tmp_path)
    cache.store(PLAN)
    found = planned(caches=(cache, PlanCache(tmp_path / "empty")), makes=(PLANS, PLANS))
    assert found == [(PLAN, "kept from an earlier run")] * 2


def test_a_kept_plan_that_does_not_fit_is_said_and_made_anew(planned, tmp_path):
    cache, anew = PlanCache(tmp_path), PLAN.replace(prediction=Prediction(2.0, 2.0, 0.0, 0.0, 10))
    cache.store(PLAN)
    with pytest.warns(PlanCacheWarning, match="does not say that it fits the memory limit"):
        assert planned(caches=[cache], makes=[anew], limit=50) == [(anew, "made for this run")]
    assert cache.load(MARK) == anew


def test_a_kept_plan_for_other_loops_is_said_and_made_anew(planned, tmp_path):
    cache = PlanCache(tmp_path)
    cache.store(PLAN.replace(decisions=(SavedGathers("decoder @forward", "decoder @backward", ("up",)),)))
    with pytest.warns(PlanCacheWarning, match="'decoder @forward', a loop that step does not have"):
        assert planned(caches=[cache]) == [(PLAN, "made for this run")]
    assert (tmp_path / "plans" / f"{MARK}.unusable").exists()


def test_a_kept_plan_that_makes_no_program_is_said_and_made_anew(planned, tmp_path, monkeypatch):
    def carry_out(*_):
        raise errors.InvariantError(1, "defined before used", "x")

    cache = PlanCache(tmp_path)
    cache.store(PLAN)
    monkeypatch.setattr(plan_module, "carry_out", carry_out)
    with pytest.warns(PlanCacheWarning, match="invariant 1 does not hold"):
        assert planned(caches=[cache]) == [(PLAN, "made for this run")]


def test_what_a_plan_is_found_by(monkeypatch):
    program, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})
    larger, _ = sharded(stack_loss, {"stack": stack_shapes(3)})
    passes, profile = (PipelineLoops(),), Profile("p", machine_of(mesh))

    def mark(program=program, limit=1 << 30, passes=passes, profile=None, host_bytes=0) -> str:
        environment = Environment(mesh, "cpu", CostModel(), limit, host_bytes)
        return session._fingerprint(program, environment, passes, profile)  # pyright: ignore

    with monkeypatch.context() as patched:
        patched.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        flagged = mark()
    with monkeypatch.context() as patched:
        patched.setattr(session, "planner_digest", lambda: "another planner")
        planned_otherwise = mark()
    others = [
        flagged,
        planned_otherwise,
        mark(larger),
        mark(limit=2 << 30),
        mark(host_bytes=2 << 30),
        mark(passes=(BucketCollectives(),)),
        mark(profile=profile),
    ]
    assert mark() == mark()
    assert len({mark(), *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("platform", "limit", "expected"),
    [("cuda", None, 92 << 30), ("cuda", 0.5, 50 << 30), ("cuda", "1GiB", 1 << 30), ("cpu", "1GiB", 0)],
)
def test_a_step_may_take_of_the_hosts_memory_as_of_the_devices(monkeypatch, platform, limit, expected):
    _, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})
    monkeypatch.setattr(session, "host_bytes_of", lambda mesh: 100 << 30)
    options = session.PlanOptions(host_memory_limit=limit)
    assert session.environment_of(mesh, platform, options).host_bytes == expected  # pyright: ignore


def test_a_limit_is_of_no_use_where_devices_have_no_memory_of_their_host(monkeypatch):
    _, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})
    monkeypatch.setattr(session, "has_host_memory", lambda mesh: False)
    options = session.PlanOptions(host_memory_limit="100GiB")
    assert session.environment_of(mesh, "cuda", options).host_bytes == 0  # pyright: ignore


def test_what_is_compiled_is_kept_beside_the_plans_whatever_the_plan_is(tmp_path, monkeypatch):
    kept: list = []
    monkeypatch.setattr(session, "_keep_executables", lambda cache, mesh: kept.append(cache.directory))
    program, mesh = sharded(stack_loss, {"stack": stack_shapes(2)})
    for wishes in (session.PlanOptions(), session.PlanOptions(plan=Plan("")), session.PlanOptions(passes=())):
        session.plan_program(program, mesh, "cpu", replace(wishes, cache_dir=tmp_path))
    assert kept == [tmp_path] * 3
