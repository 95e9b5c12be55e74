"""Plans for devices that share a host: few collectives, by what they take there."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.hardware import CPU_HOST
from jax_deepcompile.costs.network import CPU_NETWORK
from jax_deepcompile.planner import session
from jax_deepcompile.planner.candidate import Candidate, Environment
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.search import by_first_proposals, search
from jax_deepcompile.planner.strategies import ON_A_HOST
from jax_deepcompile.planner.strategies.join_collectives import JoinCollectives, break_even_bytes
from jax_deepcompile.planner.strategies.keep_gathered import KeepGathered
from jax_deepcompile.transforms.compute_whole import ComputedWhole
from jax_deepcompile.transforms.join_collectives import JoinedCollectives
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from tests.transforms.programs import STACK, halves_loss, sharded
from tests.transforms.test_join_collectives import PARAMS, loss

pytestmark = pytest.mark.cpu_mesh

COSTS = CostModel(CPU_HOST, CPU_NETWORK)


@pytest.fixture(scope="module")
def made():
    return sharded(loss, PARAMS)


def environment(mesh, costs: CostModel = COSTS, limit: int | None = None, **changes) -> Environment:
    return Environment(mesh, "cpu", costs, limit, **changes)


def planned(made, **options) -> session.Planned:
    program, mesh = made
    return session.plan_program(program, mesh, "cpu", session.PlanOptions(**options))


def test_small_collectives_are_joined_without_compiling(made, monkeypatch):
    monkeypatch.setattr(session, "search", None)
    found = planned(made)
    assert {type(each) for each in found.plan.decisions} == {JoinedCollectives, ComputedWhole}
    assert found.origin.startswith("nothing to hide: collectives here do not run beside compute")
    assert found.program is not made[0]


@pytest.mark.parametrize("passes", ["-join_collectives", ()])
def test_what_is_left_out_stays_out(made, passes):
    found = planned(made, passes=passes)
    assert not found.plan.decisions
    assert found.program is made[0]


def test_a_kind_is_left_out_alone(made):
    program, mesh = made
    plan = by_first_proposals(program, environment(mesh, disabled=frozenset({"compute_whole"})), ON_A_HOST, Plan(""))
    assert {type(each) for each in plan.decisions} == {JoinedCollectives}


def test_what_loops_gather_again_stays_gathered():
    program, mesh = sharded(halves_loss, STACK)
    plan = by_first_proposals(program, environment(mesh), (KeepGathered(),), Plan(""))
    none = by_first_proposals(program, environment(mesh), (KeepGathered(fraction=0.0),), Plan(""))
    assert bool(plan.of(KeptGathers)) == (plan.program(program, mesh) is not program)
    assert not none.of(KeptGathers)


def test_few_collectives_stay_as_they_are():
    program, mesh = sharded(lambda params, x: jnp.mean((x @ params["w"]) ** 2), {"w": (16, 16)})
    candidate = Candidate(Plan(""), program)
    assert not list(JoinCollectives().propose(program, candidate, environment(mesh)))


def test_proposals_differ(made):
    program, mesh = made
    proposals = list(JoinCollectives().propose(program, Candidate(Plan(""), program), environment(mesh)))
    assert len({each.plan for each in proposals}) == len({each.decision for each in proposals}) == len(proposals) > 0


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_the_longer_devices_wait_the_more_is_joined(made, kind):
    program, mesh = made
    sizes = [
        break_even_bytes(
            kind, program, environment(mesh, replace(COSTS, network=replace(CPU_NETWORK, launch_s=launch_s)))
        )
        for launch_s in (0.0, 1e-4, 1e-3, 1.0)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 1 << 24
    assert all(size & (size - 1) == 0 for size in sizes)


def test_nothing_is_joined_where_copies_take_forever(made):
    program, mesh = made
    slow = replace(COSTS, hardware=replace(CPU_HOST, to_host_bytes_per_s=1.0))
    assert break_even_bytes("all-gather", program, environment(mesh, slow)) == 1
    assert not list(JoinCollectives().propose(program, Candidate(Plan(""), program), environment(mesh, slow)))


def test_the_search_joins_too_and_names_the_runners_up(made):
    program, mesh = made
    best = search(program, environment(mesh), ON_A_HOST, Plan("0"))
    assert best.plan.of(JoinedCollectives)
    assert 1 <= len(best.rivals) <= 2
    assert all(each != best.plan and each.prediction for each in best.rivals)
    steps = [each.prediction.step_s for each in best.rivals if each.prediction]
    assert best.prediction.step_s <= steps[0]
    assert steps == sorted(steps)
