"""A user's own strategy and decision, made of exported names alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

import jax_deepcompile as deepcompile
from tests.cases import but_slow


@dataclass(frozen=True)
class Reversed(deepcompile.Decision, kind="reversed", after=("prefetch",)):
    """Neighbours that do not need one another trade places, so many times."""

    times: int

    def check(self, program: deepcompile.Program) -> None:
        if self.times < 1:
            raise deepcompile.errors.PlanError("the plan", f"it reverses neighbours {self.times} times")

    def describe(self) -> str:
        return f"neighbours trade places {self.times} times"

    @staticmethod
    def apply(program: deepcompile.Program, mesh: Any, decisions: Sequence[Reversed]) -> deepcompile.Program:
        jaxpr = program.jaxpr.jaxpr
        eqns = list(jaxpr.eqns)
        left = sum(each.times for each in decisions)
        for place in range(len(eqns) - 1):
            first, second = eqns[place : place + 2]
            if left and set(first.outvars).isdisjoint(atom for atom in second.invars if isinstance(atom, jex.Var)):
                eqns[place : place + 2] = second, first
                left -= 1
        return program.replace(jaxpr=jex.ClosedJaxpr(jaxpr.replace(eqns=eqns), program.jaxpr.consts))


@dataclass(frozen=True)
class Reverse:
    name: str = "reverse"
    stage: deepcompile.Stage = deepcompile.Stage.MAIN
    decisions: tuple = (Reversed,)

    def propose(
        self, base: deepcompile.Program, best: deepcompile.Candidate, environment: deepcompile.Environment
    ) -> Iterator[deepcompile.Proposal]:
        yield deepcompile.Proposal(best.plan.having(Reversed, [Reversed(3)]), "neighbours trade places")


def step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


SHAPES = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)


@pytest.mark.pure
def test_it_is_a_strategy_whose_proposal_is_evaluated(caplog):
    assert isinstance(Reverse(), deepcompile.Strategy)
    with caplog.at_level(logging.INFO, "jax_deepcompile"):
        plan = deepcompile.shard(step, {"fsdp": 8}, passes=(Reverse(),)).plan(*SHAPES)
    (record,) = plan.records
    assert (record.strategy, record.decision) == ("reverse", "neighbours trade places")
    assert any("planning step: reverse rejected: neighbours trade places" in line for line in caplog.messages)


@pytest.mark.cpu_mesh
def test_its_decision_is_carried_out_checked_written_and_read():
    plan = deepcompile.Plan("", (Reversed(3),))
    assert deepcompile.Plan.from_json(plan.to_json(), decisions=(Reversed,)) == plan
    with pytest.raises(deepcompile.errors.PlanError, match=r"decisions.0..kind: 'reversed' is none"):
        deepcompile.Plan.from_json(plan.to_json())
    assert str(plan) == "neighbours trade places 3 times"
    w, x = (jax.random.normal(jax.random.key(seed), (16, 16)) for seed in (0, 1))
    given = deepcompile.shard(step, {"fsdp": 8}, plan=plan)
    assert given.trace(*SHAPES).planned.jaxpr.jaxpr.eqns != given.trace(*SHAPES).sharded.jaxpr.jaxpr.eqns
    for got, expected in zip(given(w + 0, x), deepcompile.shard(step, {"fsdp": 8})(w + 0, x), strict=True):
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(deepcompile.errors.PlanError, match="it reverses neighbours 0 times"):
        deepcompile.shard(step, {"fsdp": 8}, plan=deepcompile.Plan("", (Reversed(0),))).plan(*SHAPES)


@pytest.mark.pure
def test_a_cached_plan_may_hold_it(tmp_path):
    asked = {"passes": (Reverse(),), "cache_dir": tmp_path}
    first = deepcompile.shard(step, {"fsdp": 8}, **asked).plan(*SHAPES)
    assert deepcompile.shard(step, {"fsdp": 8}, **asked).plan(*SHAPES) == first


@pytest.mark.pure
@pytest.mark.parametrize("where", but_slow(["passes", "DEEPCOMPILE_DISABLE"], ["passes"]))
def test_strategies_and_kinds_of_decisions_are_left_out_by_name(monkeypatch, where: str):
    def loss(params, x):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    def stacked(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grad, value

    shapes = jax.ShapeDtypeStruct((6, 4096, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    mesh = deepcompile.targets.h100(nodes=1).make_mesh((8,), ("fsdp",))

    def planned(names: str) -> deepcompile.Plan:
        if where == "passes":
            return deepcompile.shard(stacked, mesh, passes=", ".join(f"-{name}" for name in names.split(","))).plan(
                *shapes
            )
        monkeypatch.setenv(where, names)
        return deepcompile.shard(stacked, mesh).plan(*shapes)

    everything = {each.kind for each in deepcompile.shard(stacked, mesh).plan(*shapes).decisions}
    assert {"pipeline_loops", "compute_once"} <= everything
    fewer = planned("compute_once,unshard")
    assert {each.kind for each in fewer.decisions} <= everything - {"compute_once"}
    assert "unshard" not in {record.strategy for record in fewer.records}
    with pytest.raises(deepcompile.errors.UnknownPassError, match=r"leaves out 'unshart', .*'unshard'"):
        planned("unshart")
