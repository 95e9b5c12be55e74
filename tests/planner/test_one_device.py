"""On one GPU there is nothing to communicate, but activations that memory holds need not be computed again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.offload_state import OffloadedState
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule
from jax_deepcompile.transforms.rematerialize import Rematerialized
from jax_deepcompile.transforms.update_in_loops import UpdatedInLoop
from tests.partition.steps import shapes, training_step

pytestmark = pytest.mark.h100_aot

LAYERS, WIDTH, ROWS = 4, 2048, 8192

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
STATE: dict[str, Any] = {"rows": 1024, "layers": 16, "optimizer": optax.adam(1e-3), "checkpointed": True}
"""Parameters and two moments of 16 layers, 128 MiB each, take 6 GiB."""


def traced(checkpointed: bool, rows: int = ROWS, layers: int = LAYERS, optimizer=CLIPPED, **options):
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None

    def loss(params, x):
        return jnp.mean(lax.scan(jax.checkpoint(layer) if checkpointed else layer, x, params)[0] ** 2)

    params = shapes({"up": (layers, WIDTH, 4 * WIDTH), "down": (layers, 4 * WIDTH, WIDTH)})
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    mesh = deepcompile.targets.h100(gpus_per_node=1).make_mesh((1,), ("fsdp",))
    return deepcompile.shard(training_step(loss, optimizer), mesh, **options).trace(state, shapes((rows, WIDTH)))


def test_checkpointed_layers_are_planned():
    plan = traced(checkpointed=True).plan()
    assert plan.of(KeptActivations)
    assert [record.strategy for record in plan.records if record.accepted] == ["keep_activations"]


def test_moments_on_the_host_are_copied_beside_the_backward_pass():
    limit = {"memory_limit": "4.5GiB"}
    plan, before = traced(**STATE, **limit).plan(), traced(**STATE, **limit, passes="-update_in_loops").plan()
    (updated,), (away,) = plan.of(UpdatedInLoop), plan.of(OffloadedState)
    assert updated.loop.endswith(" @backward")
    assert set(updated.copied) == set(away.leaves)
    assert {each.loop for each in plan.of(LoopSchedule)} >= {updated.loop}, "in place"
    assert not before.of(UpdatedInLoop)
    assert plan.prediction.peak_bytes <= 4.5 * 2**30
    assert plan.prediction.step_s < 0.8 * before.prediction.step_s


def test_where_a_norm_of_all_gradients_comes_before_the_update_they_are_in_a_second_run():
    clipped = STATE | {"optimizer": optax.chain(CLIPPED, STATE["optimizer"])}
    limit = {"memory_limit": "5.5GiB"}
    plan, before = traced(**clipped, **limit).plan(), traced(**clipped, **limit, passes="-update_in_loops").plan()
    ((updated,), (away,)), other = map(plan.of, (UpdatedInLoop, OffloadedState)), before.of(OffloadedState)
    assert updated.twice
    assert set(updated.copied) == set(away.leaves)
    assert {each.loop for each in plan.of(LoopSchedule)} >= {updated.updating}, "in place"
    assert other
    assert not before.of(UpdatedInLoop)
    assert plan.prediction.step_s < 0.8 * before.prediction.step_s


def test_unless_computing_twice_takes_longer():
    """Than the copies of moments: 32,768 rows."""
    clipped = STATE | {"optimizer": optax.chain(CLIPPED, STATE["optimizer"]), "rows": 1 << 15}
    plan = traced(**clipped, memory_limit="9GiB").plan()
    assert plan.of(OffloadedState)
    assert not plan.of(UpdatedInLoop)


def test_others_that_fit_are_left_as_they_are_unless_computing_again_is_faster():
    step = traced(checkpointed=False)
    assert set(map(type, step.plan().decisions)) <= {Rematerialized, KeptActivations}
    assert not traced(checkpointed=False, passes="-rematerialize").plan().decisions


def test_without_layers_there_is_nothing_to_decide():
    step = traced(checkpointed=False, layers=0)
    assert not step.plan().decisions
    assert "nothing to decide: there is one device" in step.explain()


def test_what_a_gpu_cannot_hold_is_an_error_by_default():
    """A million rows of four layers' activations are 200 GB."""
    step = traced(checkpointed=False, rows=1 << 20)
    with pytest.raises(deepcompile.errors.MemoryExceededError, match=r"more than the limit of 72\.78 GiB"):
        step.plan()


MANY = {"checkpointed": False, "rows": 1 << 17, "layers": 16}
"""As written they take 194 GiB."""


@pytest.mark.parametrize(("passes", "kind"), [(None, Rematerialized), ("-rematerialize", OffloadedActivations)])
def test_but_it_may_compute_those_of_many_layers_again_or_hold_them_on_its_host(passes, kind):
    plan = traced(**MANY, passes=passes).plan()
    assert plan.of(kind)
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes < 64 << 30


def test_a_host_that_may_give_little_holds_too_few():
    with pytest.raises(deepcompile.errors.MemoryExceededError):
        traced(**MANY, passes="-rematerialize", host_memory_limit="1GiB").plan()
