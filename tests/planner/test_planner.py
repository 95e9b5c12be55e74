"""A language model of scanned layers planned for 32 H100s: faster, within the limit, hidden, kept for the next run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.planner import limits, search
from jax_deepcompile.planner.cache import PlanCacheWarning
from jax_deepcompile.planner.layers import not_pipelined
from jax_deepcompile.planner.strategies.pipeline_loops import PipelineLoops
from jax_deepcompile.transforms.keep_gathered import KeptGathers
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives
from tests.partition.steps import shapes, training_step
from tests.schedules import loop_bodies, work_while_under_way

pytestmark = pytest.mark.h100_aot

DEVICES, LENGTH = 32, 512
LIMIT_BYTES = 5 << 29


def trace(memory_limit=LIMIT_BYTES, length=LENGTH, **options):
    """Eight layers of two matrices between an embedding and logits."""
    params = shapes({"embedding": (32000, 4096), "up": (8, 4096, 8192), "down": (8, 8192, 4096)})

    @jax.checkpoint
    def layer(x, weights):
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    def loss(params, tokens):
        embedding, up, down = (params[name].astype(jnp.bfloat16) for name in ("embedding", "up", "down"))
        x, _ = jax.lax.scan(layer, embedding[tokens[:, :-1]], (up, down))
        logits = (x @ embedding.T).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    mesh, optimizer = deepcompile.targets.h100(nodes=4).make_mesh((DEVICES,), ("fsdp",)), optax.adamw(3e-4)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    tokens = jax.ShapeDtypeStruct((2 * DEVICES, length + 1), jnp.int32)
    return deepcompile.shard(training_step(loss, optimizer), mesh, memory_limit=memory_limit, **options).trace(
        state, tokens
    )


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

    monkeypatch.setattr(search, "evaluate", refuse)


def test_the_planned_step_is_faster_and_fits(planned):
    plain = expected(trace(passes=()).plan())
    best = expected(planned.plan())
    assert plain.step_s >= 1.15 * best.step_s
    assert best.peak_bytes <= LIMIT_BYTES


def test_explain_tells_decisions_and_expectations(planned):
    text = planned.explain()
    best = expected(planned.plan())
    assert "plan: made for this run" in text
    assert "pipeline_loops [accepted]" in text
    assert "keep_activations [accepted]" in text
    assert "parameters of every layer stay gathered" in text
    assert f"memory at the peak: {best.peak_bytes / 2**30:.2f} GiB a device of 2.50 GiB" in text
    chain = [record for record in planned.plan().records if record.accepted]
    assert [record.before for record in chain[1:]] == [record.after for record in chain[:-1]]
    assert chain[-1].after == best
    decisions = text.decisions
    found = [line for change in decisions.changes for line in change.decisions]
    assert sorted([*decisions.first, *found]) == sorted(decisions.decisions)
    steps = [decisions.first_s, *(change.after_s for change in decisions.changes)]
    assert [change.before_s for change in decisions.changes] == steps[:-1]
    assert steps[-1] == best.step_s


def test_explain_begins_with_what_one_quotes(planned):
    head, step_s = planned.explain().headline, expected(planned.plan()).step_s
    assert head.parameters == sum(math.prod(port.shape) for port in planned.program.inputs if "['params']" in port.path)
    assert (head.examples, head.tokens) == (2 * DEVICES, 2 * DEVICES * (LENGTH + 1))
    assert (head.step_s, head.basis, head.mfu) == (
        step_s,
        "simulated of XLA's schedule",
        planned.utilisation.mfu(step_s),
    )
    assert head.tokens_per_s == pytest.approx(2 * (LENGTH + 1) / step_s)
    first = str(planned.explain()).splitlines()[:10]
    for said in ("parameters", "64 x 513 tokens", "4 nodes of 8 H100 SXM", "published tables", "tokens/s/GPU", "MFU"):
        assert any(said in line for line in first), said


def test_parts_of_the_time_add_up_to_the_step(planned):
    seconds = planned.explain().seconds
    assert sum(part.seconds for part in seconds.parts) == pytest.approx(seconds.step_s, rel=1e-9)
    waited_s = sum(part.seconds for part in seconds.parts if part.what.startswith("waiting for "))
    assert waited_s == pytest.approx(seconds.exposed_s + seconds.exposed_copy_s, rel=1e-9)
    ceilings = [ceiling.seconds for ceiling in seconds.ceilings]
    assert ceilings == sorted(ceilings, reverse=True)
    assert ceilings[0] <= seconds.bound_s <= seconds.step_s
    assert any("tests/planner/test_planner.py:" in each.line for each in seconds.kernels)
    assert 0 < sum(each.seconds for each in seconds.waits) <= waited_s


def test_roles_add_up_to_the_peak(planned):
    memory = planned.explain().memory
    sizes = {each.role: each.bytes for each in memory.roles}
    assert sum(sizes.values()) == memory.peak_bytes == expected(planned.plan()).peak_bytes
    assert sizes["optimizer state"] == pytest.approx(2 * sizes["parameters"], rel=0.01)
    assert {"kept for the backward pass", "gathered from other devices"} <= sizes.keys()
    assert sizes.get("other", 0) < 0.02 * memory.peak_bytes
    assert any("tests/planner/test_planner.py:" in block.line for block in memory.largest)


def test_what_ends_a_cell_is_short(planned):
    mesh = deepcompile.targets.h100(nodes=4).make_mesh((DEVICES,), ("fsdp",))
    run, plan = deepcompile.simulate(planned, mesh), planned.plan()
    shown = [planned, plan, run, planned.planned, planned.partitioned, planned.partitioned.layout, run.memory]
    assert all(len(repr(each)) < 1500 for each in [*shown, *plan.records])
    step_s = f"{expected(plan).step_s:.4g} s, simulated"
    assert step_s in repr(planned)
    assert step_s in repr(plan)
    assert "of 2.5 GiB" in repr(planned)
    assert f"{len(plan.latencies)} latencies to schedule by" in repr(plan)
    assert repr(run).startswith("Simulation before compilation, without XLA's fusions and schedule")


@pytest.mark.usefixtures("nothing_compiled")
def test_the_next_run_keeps_the_plan(planned, cache):
    again = trace(cache_dir=cache)
    assert again.plan() == planned.plan()
    assert "plan: kept from an earlier run" in again.explain()


def test_a_plan_of_another_run_is_explained_and_shown_as_if_it_were_made_here(planned):
    given, made = trace(plan=planned.plan()), planned.explain()
    told = given.explain()
    assert (told.headline, told.seconds, told.memory) == (made.headline, made.seconds, made.memory)
    assert dataclasses.replace(told.decisions, origin=made.decisions.origin) == made.decisions
    first, *others, last = given.page().data["runs"]
    assert (first["name"], last["name"]) == ("as divided", "planned")
    assert {each["name"].partition(". ")[2] for each in others} >= {"keep_activations", "pipeline_loops"}
    assert last["figures"] == planned.page().data["runs"][-1]["figures"]


def test_how_a_plan_came_about_for_another_step_is_not_told_of_this_one(planned):
    shorter = trace(plan=planned.plan(), length=LENGTH // 2)
    told, divided = shorter.explain(), trace(passes=(), length=LENGTH // 2).plan()
    (change,) = told.decisions.changes
    assert (told.decisions.first_s, told.headline.before_s) == (change.before_s, change.before_s)
    assert change.before_s == pytest.approx(expected(divided).step_s, rel=0.01)
    assert (change.strategy, change.after_s, told.decisions.rejected) == ("plan", told.headline.step_s, ())


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
    edited = not_pipelined(planned.plan()).without(StackCollectives, SavedGathers, KeptGathers).replace(latencies=())
    traced = trace(plan=edited)
    assert traced.plan().replace(prediction=None) == edited
    assert expected(traced.plan()).step_s > expected(planned.plan()).step_s
    assert "plan: given" in traced.explain()
    assert str(traced.planned.jaxpr) != str(planned.planned.jaxpr)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_plan_of_another_run_is_carried_out_at_once(planned):
    assert trace(plan=planned.plan()).plan() == planned.plan()


def test_a_given_plan_that_takes_too_much_is_an_error(planned):
    with pytest.raises(
        deepcompile.errors.MemoryExceededError, match=r"more than the limit of 256\.00 MiB.*test_planner\.py:\d+"
    ):
        trace(plan=planned.plan(), memory_limit="0.25GiB").plan()


def test_the_limit_holds_in_what_is_compiled_at_last(planned, monkeypatch):
    """Whatever the plan says it takes."""
    traced = trace(plan=planned.plan(), memory_limit=LIMIT_BYTES)
    monkeypatch.setattr(limits, "peak_bytes", lambda memory: LIMIT_BYTES + (1 << 30))
    with pytest.raises(deepcompile.errors.MemoryExceededError, match=r"1\.00 GiB more than the limit of 2\.50 GiB"):
        traced.lower().compile()


@pytest.fixture(scope="module")
def bodies():
    """Of the loops over layers of a step planned with pipelined loops only."""
    module = read(trace(passes=(PipelineLoops(),)).lower().compile().as_text())
    found = [work_while_under_way(body) for body in loop_bodies(module)]
    return {frozenset(opcode for opcode, _ in body): body for body in found if body}


FORWARD_KINDS, BACKWARD_KINDS = ("all-gather-start",), ("all-gather-start", "reduce-scatter-start")


@pytest.mark.parametrize("kinds", [FORWARD_KINDS, BACKWARD_KINDS], ids=["forward", "backward"])
def test_every_layer_sized_collective_of_a_loop_has_work_beside_it(bodies, kinds):
    """Forward loops gather, backward loops gather and reduce."""
    assert set(bodies) == {frozenset(FORWARD_KINDS), frozenset(BACKWARD_KINDS)}
    assert all(work for _, work in bodies[frozenset(kinds)]), bodies
