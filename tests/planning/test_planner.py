"""A plain Llama step planned for 32 H100s: faster, within the limit, hidden, kept for the next run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from jax_deepcompile.cache import PlanCacheWarning
from jax_deepcompile.lowering.hlo import read
from jax_deepcompile.planning import pass_manager
from jax_deepcompile.planning.proposals import PipelineLoops
from models import llama
from tests.schedules import loop_bodies, work_while_under_way

pytestmark = [pytest.mark.h100_aot, pytest.mark.xdist_group("planner")]

CONFIG = dataclasses.replace(llama.LLAMA3_70B, n_layers=6)
DEVICES, LENGTH = 32, 512
LIMIT_BYTES = 24 << 30


def trace(**options):
    mesh = deepcompile.targets.h100(nodes=4).make_mesh((DEVICES,), ("fsdp",))
    model, optimizer = llama.Llama(CONFIG), optax.adamw(3e-4)

    def create(key):
        params = model.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, tokens):
        def loss_of(params):
            return llama.next_token_loss(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    state = jax.eval_shape(create, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2 * DEVICES, LENGTH + 1), jnp.int32)
    return deepcompile.shard(step, mesh, memory_limit=LIMIT_BYTES, **options).trace(state, tokens)


def expected(plan):
    assert plan.prediction is not None
    return plan.prediction


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def planned(cache):
    traced = trace(cache_dir=cache)
    traced.plan()
    return traced


@pytest.fixture
def nothing_compiled(monkeypatch):
    def refuse(*_: Any):
        raise AssertionError("a candidate was compiled")

    monkeypatch.setattr(pass_manager, "attempt", refuse)


def test_the_planned_step_is_faster_and_fits(planned):
    plain = expected(trace(passes=()).plan())
    best = expected(planned.plan())
    assert plain.step_s >= 1.15 * best.step_s
    assert best.peak_bytes <= LIMIT_BYTES


def test_explain_tells_decisions_and_expectations(planned):
    text = planned.explain()
    best = expected(planned.plan())
    assert "plan: made for this run" in text
    assert "pipeline_loops [taken" in text
    assert "keep_activations [taken" in text
    assert "parameters of every layer stay gathered" in text
    assert f"expected step: {best.step_s:.4g} s" in text
    assert f"peak memory: {best.peak_bytes / 2**30:.2f} GiB a device of 24.00 GiB" in text


@pytest.mark.usefixtures("nothing_compiled")
def test_the_next_run_keeps_the_plan(planned, cache):
    again = trace(cache_dir=cache)
    assert again.plan() == planned.plan()
    assert "plan: kept from an earlier run" in again.explain()


@pytest.mark.usefixtures("nothing_compiled")
def test_a_corrupt_entry_is_reported_and_planned_anew(planned, tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / f"{planned.plan().fingerprint}.json").write_text("{")
    with (
        pytest.warns(PlanCacheWarning, match="is not used: .*planned anew"),
        pytest.raises(AssertionError, match="a candidate was compiled"),
    ):
        trace(cache_dir=tmp_path).plan()


def test_an_edited_plan_is_carried_out_as_it_is(planned):
    """Nothing is pipelined, nothing kept."""
    edited = planned.plan().replace(stacks=(), handed_over=(), loops=(), kept=(), latencies=())
    traced = trace(plan=edited)
    assert traced.plan() == edited
    assert "plan: given" in traced.explain()
    assert str(traced.planned.jaxpr) != str(planned.planned.jaxpr)


@pytest.fixture(scope="module")
def under_way():
    """In the loops of a step planned with pipelined loops only: each layer-sized collective, and the work beside it."""
    module = read(trace(passes=(PipelineLoops(),)).lower().compile().as_text())
    return [found for body in loop_bodies(module) for found in work_while_under_way(body)]


@pytest.mark.parametrize("kind", ["all-gather-start", "reduce-scatter-start"])
def test_layer_sized_collectives_in_loops_have_work_beside_them(under_way, kind):
    work = [number for opcode, number in under_way if opcode == kind]
    assert work
    assert all(work), work
