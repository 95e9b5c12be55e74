"""Plans made for eight H100s, carried out on eight CPU devices: what the passes make of a step computes the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.planner.layers import copying_ahead, pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import find_recomputation
from jax_deepcompile.transforms.delay_reductions import DelayedReductions, sum_names
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.save_gathered import SavedGathers
from models import llama
from tests.equality.harness import assert_close

pytestmark = [pytest.mark.h100_aot, pytest.mark.cpu_mesh]

TOKENS = np.random.default_rng(0).integers(0, 64, (16, 17), np.int32)


class Layers(nn.Module):
    """Layers one by one, the first of which sees what the last one made of it."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 128)(tokens)
        for index in range(4):
            x = x + nn.Dense(128)(nn.gelu(nn.Dense(512, name=f"up_{index}")(nn.LayerNorm()(x))))
        return nn.Dense(64)(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))


class CheckpointedLayers(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 128)(tokens)
        for _ in range(4):
            x = nn.remat(Block)()(x)
        return nn.Dense(64)(x)


def scanned() -> nn.Module:
    return llama.Llama(dataclasses.replace(llama.LLAMA_TINY, vocab_size=64, n_layers=6, n_kv_heads=4))


def training(model: nn.Module) -> tuple[Callable, TrainState]:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def step(state, tokens):
        def loss_of(params):
            return llama.next_token_loss(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    params = jax.jit(model.init)(jax.random.key(0), TOKENS[:1, :-1])["params"]
    return step, TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


@pytest.mark.parametrize(
    ("create", "microbatches"),
    [*(pytest.param(scanned, count, marks=pytest.mark.slow) for count in (1, 2)), (Layers, 1)],
)
def test_a_planned_step_equals_one_device(create, microbatches):
    step, state = training(create())
    h100s = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    plan = deepcompile.shard(step, h100s, microbatches=microbatches).plan(state, TOKENS)
    assert plan.decisions or microbatches > 1
    assert_trains_alike(step, state, plan, microbatches)


@pytest.mark.parametrize(
    ("create", "microbatches"),
    [(scanned, 1), (scanned, 2), (CheckpointedLayers, 2)],
)
@pytest.mark.slow
def test_so_it_does_with_every_activation_kept(create, microbatches):
    step, state = training(create())
    h100s = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    passes = (deepcompile.PipelineLoops(),)
    traced = deepcompile.shard(step, h100s, microbatches=microbatches, passes=passes).trace(state, TOKENS)
    plan = traced.plan()
    turns = find_recomputation(plan.program(traced.sharded, h100s, until=SavedGathers), CostModel())
    assert turns
    every = [KeptActivations(*turn.loops, turn.names) for turn in turns]
    assert_trains_alike(step, state, plan.having(KeptActivations, every), microbatches)


@pytest.mark.parametrize(
    "create", [scanned, *(pytest.param(each, marks=pytest.mark.slow) for each in (Layers, CheckpointedLayers))]
)
def test_so_it_does_with_every_sum_reduced_in_the_next_microbatch(create):
    step, state = training(create())
    h100s = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    traced = deepcompile.shard(step, h100s, microbatches=2, passes=()).trace(state, TOKENS)
    plan = pipelined(traced.plan(), traced.sharded, choose_schedules(traced.sharded))
    assert bool(plan.of(LoopSchedule)) == (create is scanned)
    program = plan.program(traced.sharded, h100s, until=DelayedReductions)
    found = {loop.name: list(sum_names(program, loop)) for loop in find_loops(program)}
    apart = create is Layers
    delayed = [DelayedReductions(name, tuple(sums), apart) for name, sums in found.items() if sums]
    assert delayed
    assert_trains_alike(step, state, plan.having(DelayedReductions, delayed), 2)


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_on_the_host_meanwhile_activations_are_the_same_bits(microbatches):
    step, state = training(scanned())
    h100s = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    traced = deepcompile.shard(step, h100s, microbatches=microbatches, passes=()).trace(state, TOKENS)
    turns = [turn for turn in find_recomputation(traced.sharded, CostModel()) if turn.is_of_loops]
    kept = [KeptActivations(*turn.loops, turn.names) for turn in turns]
    away = [OffloadedActivations(*turn.loops, (*turn.names, *(each.name for each in turn.residuals))) for turn in turns]
    plan = copying_ahead(Plan("", (*kept, *away)), traced.sharded, h100s).replace(options={})
    found = [
        deepcompile.shard(step, plan=each, microbatches=microbatches)(jax.tree.map(jnp.copy, state), TOKENS)
        for each in (plan, plan.having(OffloadedActivations, ()))
    ]
    assert_close(*found, 0, "state and loss")


def assert_trains_alike(step: Callable, state: TrainState, plan: Plan, microbatches: int) -> None:
    rewrites = plan.replace(options={}, latencies=())
    planned, plain = deepcompile.shard(step, plan=rewrites, microbatches=microbatches), jax.jit(step)
    mine, theirs = jax.tree.map(jnp.copy, state), state
    for count in range(3):
        mine, loss = planned(mine, TOKENS)
        theirs, expected = plain(theirs, TOKENS)
        assert_close((mine, loss), (theirs, expected), 2e-5, f"step {count}")
