"""A step whose state is on the host between steps trains to the same bits, and finds its state wherever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_deepcompile as deepcompile
from jax_deepcompile.ir.memory import HOST_KIND
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.training.checkpoints import abstract
from jax_deepcompile.transforms.offload_state import OffloadedState, movable
from tests.equality.harness import assert_close

pytestmark = pytest.mark.cpu_mesh

FLAT = {"fsdp": 8}
X = np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32)


def model() -> dict:
    keys = jax.random.split(jax.random.key(0))
    return {
        "first": {"kernel": jax.random.normal(keys[0], (32, 64)) / 8, "bias": jnp.zeros(64)},
        "second": {"kernel": jax.random.normal(keys[1], (64, 32)) / 8, "bias": jnp.zeros(32)},
    }


def loss_of(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((x - 0.5) ** 2)


def with_optimizer(optimizer) -> tuple[Callable, Callable]:
    def step(state, x):
        loss, grads = jax.value_and_grad(loss_of)(state["p"], x)
        updates, opt_state = optimizer.update(grads, state["optimizer"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "optimizer": opt_state}, loss

    return step, lambda: {"p": model(), "optimizer": optimizer.init(model())}


def by_hand() -> tuple[Callable, Callable]:
    def step(state, x):
        loss, g = jax.value_and_grad(loss_of)(state["p"], x)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], g)
        p = jax.tree.map(lambda p, m, v: p - 1e-2 * m / (jnp.sqrt(v) + 1e-3), state["p"], m, v)
        return {"p": p, "m": m, "v": v}, loss

    zeros = jax.tree.map(jnp.zeros_like, model())
    return step, lambda: {"p": model(), "m": zeros, "v": jax.tree.map(jnp.copy, zeros)}


ADAMW = with_optimizer(optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2, eps=1e-3)))
STEPS = {
    "adamw": ADAMW,
    "adafactor": with_optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "momentum": with_optimizer(optax.sgd(0.1, momentum=0.9)),
    "lamb": with_optimizer(optax.lamb(1e-2, eps=1e-3)),
    "by hand": by_hand(),
}


def moments(step: deepcompile.ShardedStep, *args) -> tuple[str, ...]:
    """All leaves of the state but parameters."""
    known = movable(step.trace(*args).sharded).values()
    return tuple(name for name in known if not name.startswith(("first", "second", "p/")))


def two(step: Callable, create: Callable, **options: Any):
    """A step with all its state on the device, and the same with moments on the host."""
    plain = deepcompile.shard(step, FLAT, **options)
    leaves = moments(plain, create(), X)
    assert leaves
    return plain, plain.reshard(plan=Plan("", (OffloadedState(leaves),)))


def on_host(tree: Any) -> set[str]:
    return {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.sharding.memory_kind == HOST_KIND
    }


def planned(step: deepcompile.ShardedStep, create: Callable) -> set[str]:
    """The paths in the state of what the step has on the host."""
    inputs = step.trace(jax.eval_shape(create), X).planned.inputs
    return {port.path.removeprefix("state") for port in inputs if port.memory_kind == HOST_KIND}


@pytest.mark.parametrize("name", STEPS)
def test_it_trains_to_the_same_bits_and_leaves_are_where_they_are_planned(name):
    create = STEPS[name][1]
    plain, away = two(*STEPS[name])
    there = planned(away, create)
    assert there
    theirs, mine = plain.init(create), away.init(create)
    for count in range(4):
        assert on_host(mine) == there
        before = mine, theirs
        (mine, loss), (theirs, expected) = away(mine, X), plain(theirs, X)
        assert_close((mine, loss), (theirs, expected), 0, f"step {count}")
        assert on_host(theirs) == set()
        mine_gone, theirs_gone = ([leaf.is_deleted() for leaf in jax.tree.leaves(each)] for each in before)
        assert mine_gone == theirs_gone


def test_in_microbatches_too():
    plain, away = two(*ADAMW, microbatches=2)
    assert_close(away(ADAMW[1](), X), plain(ADAMW[1](), X), 0, "step")


def test_beside_axes_that_are_left_to_xla_too():
    mesh = jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step, create = ADAMW
    plain = deepcompile.shard(step, mesh)
    away = plain.reshard(plan=Plan("", (OffloadedState(moments(plain, create(), X)),)))
    mine, theirs = create(), create()
    for _ in range(2):
        (mine, loss), (theirs, expected) = away(mine, X), plain(theirs, X)
        assert_close((mine, loss), (theirs, expected), 0, "step")
    assert on_host(mine)
    assert on_host(theirs) == set()


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def test_objects_are_updated_in_place_on_the_host():
    def create():
        network = Network(nnx.Rngs(0))
        return network, nnx.Optimizer(network, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)

    def step(network, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda network: jnp.mean((network(x) - 0.5) ** 2))(network)
        optimizer.update(network, grads)
        return loss

    plain = deepcompile.shard(step, FLAT)
    theirs = plain.init(create)
    leaves = [name for name in movable(plain.trace(*theirs, X).sharded).values() if {"mu", "nu"} & {*name.split("/")}]
    away = plain.reshard(plan=Plan("", (OffloadedState(tuple(leaves)),)))
    away.trace(*theirs, X)
    mine = away.init(create)
    for _ in range(3):
        assert len(on_host(nnx.state(mine[1]))) == len(leaves) == 8
        assert on_host(nnx.state(mine[0])) == set()
        assert away(*mine, X) == plain(*theirs, X)
    assert_close(nnx.state(mine[0]), nnx.state(theirs[0]), 0, "network")


def test_state_is_born_where_the_plan_has_it_traced_or_not():
    step, create = ADAMW
    plain, away = two(step, create)
    assert on_host(away.init(create)) == planned(away, create) != set()
    away.trace(jax.eval_shape(create), X)
    assert on_host(away.init(create)) == planned(away, create)
    assert on_host(away.init(model)) == on_host(plain.init(create)) == set()


def test_what_a_plan_has_not_is_born_on_the_device():
    step, create = ADAMW
    other = deepcompile.shard(step, FLAT, plan=Plan("", (OffloadedState(("moments/of/another",)),)))
    assert on_host(other.init(create)) == set()


def test_state_on_the_device_is_moved_once_and_frees_the_device():
    plain, away = two(*ADAMW)
    state = given = plain.init(ADAMW[1])
    state, _ = away(state, X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    there = state["optimizer"][1][0].mu["first"]["kernel"]
    pointers = [shard.data.unsafe_buffer_pointer() for shard in there.addressable_shards]
    state, _ = away(state, X)
    after = state["optimizer"][1][0].mu["first"]["kernel"]
    assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == pointers
    again, _ = away(plain.init(ADAMW[1]), X)
    assert on_host(again) == on_host(state)


def test_what_is_not_donated_is_not_freed():
    """The same array twice, once as what the step only reads."""

    def step(state, other, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["p"])
        m = 0.9 * state["m"] + g
        return {"p": state["p"] - 0.1 * m, "m": m}, loss + jnp.sum(other)

    shared = deepcompile.shard(step, FLAT, state_argnums=0, batch_argnums=2)
    state = shared.init(lambda: {"p": jnp.ones((32, 32)), "m": jnp.ones((32, 32))})
    away = shared.reshard(plan=Plan("", (OffloadedState(("m",)),)))
    m = state["m"]
    away(state, m, X)
    assert not m.is_deleted()
    assert state["p"].is_deleted()


def test_back_on_the_device_it_goes_on():
    plain, away = two(*ADAMW)
    mine, _ = plain(away(ADAMW[1](), X)[0], X)
    theirs, _ = plain(plain(ADAMW[1](), X)[0], X)
    assert on_host(mine) == set()
    assert_close(mine, theirs, 0, "state")


@pytest.mark.parametrize("away_first", [True, False], ids=["host to device", "device to host"])
def test_a_checkpoint_serves_both(tmp_path: Path, away_first: bool):
    plain, away = two(*ADAMW)
    first, second = (away, plain) if away_first else (plain, away)
    saved, _ = first(ADAMW[1](), X)
    second.trace(jax.eval_shape(ADAMW[1]), X).plan()
    target = abstract(second.init(ADAMW[1]))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", target)
    assert_close(restored, saved, 0, "restored")
    assert on_host(restored) == (set() if away_first else planned(away, ADAMW[1]))
    assert_close(second(restored, X), first(saved, X), 0, "next step")


def test_a_plan_edited_by_hand_moves_what_it_names():
    plain, away = two(*ADAMW)
    document = json.loads(away.trace(ADAMW[1](), X).plan().to_json())
    (decision,) = document["decisions"]
    decision["leaves"] = [name for name in decision["leaves"] if name.endswith("mu/first/kernel")]
    edited = plain.reshard(plan=deepcompile.Plan.from_json(json.dumps(document)))
    assert on_host(edited(ADAMW[1](), X)[0]) == {"['optimizer'][1][0].mu['first']['kernel']"}


def test_a_plan_for_gpus_is_carried_out_on_cpus():
    """Also where the memory that a step may take is limited."""
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    leaves = moments(deepcompile.shard(ADAMW[0], mesh), jax.eval_shape(ADAMW[1]), X)
    theirs = deepcompile.shard(ADAMW[0], mesh, plan=Plan("", (OffloadedState(leaves),)))
    plan = theirs.trace(jax.eval_shape(ADAMW[1]), X).plan()
    assert plan.prediction is not None
    for limit in (None, "1GiB"):
        mine, _ = deepcompile.shard(ADAMW[0], FLAT, plan=plan, memory_limit=limit)(ADAMW[1](), X)
        assert len(on_host(mine)) == len(leaves)


def test_under_jit_it_is_the_same_step():
    plain, away = two(*ADAMW)
    state, _ = away(ADAMW[1](), X)
    theirs, _ = plain(plain(ADAMW[1](), X)[0], X)
    assert_close(jax.jit(lambda state: away(state, X)[0])(state), theirs, 1e-6, "state")
