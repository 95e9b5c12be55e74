"""A plain Llama train step, fully sharded, compiled by the real XLA:GPU compiler for 32 H100s: what it moves and takes.

What planning makes of it is tested in ``tests/planner/test_planner.py``.
"""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

import jax_deepcompile as deepcompile
from experiments.bench.steps import llama_gradients, training_step
from models import llama

pytestmark = pytest.mark.h100_aot

LAYERS = 4
CONFIG = dataclasses.replace(llama.LLAMA3_70B, n_layers=LAYERS)
LAYER_LEAVES = 9


@pytest.fixture(scope="module")
def compiled():
    mesh = deepcompile.targets.h100(nodes=4).make_mesh((32,), ("fsdp",))
    gradients, state = llama_gradients(CONFIG, by_hand=False)
    step = deepcompile.shard(training_step(gradients), mesh, passes=())
    traced = step.trace(state, jax.ShapeDtypeStruct((32, 1025), jnp.int32))
    return state, traced, traced.lower().compile()


def test_arguments_are_one_thirty_second_of_the_state(compiled):
    state, _, executable = compiled
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert executable.memory_analysis().argument_size_in_bytes == pytest.approx(whole / 32, rel=0.02)


def test_nothing_but_gathers_reduce_scatters_and_scalars(compiled):
    text = compiled[2].as_text()
    assert " all-to-all" not in text
    for line in re.findall(r"= (.*) all-reduce(?:-start)?\(", text):
        for dims in re.findall(r"\w+\[([\d,]*)\]", line):
            assert math.prod(int(dim) for dim in dims.split(",") if dim) <= 8, line


def test_every_layer_is_gathered_once_forward_and_once_backward_in_bfloat16(compiled):
    _, traced, _ = compiled
    text = str(traced.sharded.jaxpr)
    gathered = re.findall(r":(\w+)\[([\d,]+)\] = all_gather\[", text)
    assert len(gathered) == 2 * LAYER_LEAVES + 5  # the head, the last norm twice, tokens, gradients of embeddings
    assert all(dtype == "bf16" for dtype, dims in gathered if dims.count(",") == 1 and "128256" not in dims)
    assert text.count("= reduce_scatter[") == LAYER_LEAVES + 3


def test_temporaries_hold_no_whole_stack(compiled):
    """Unsharded, the stack alone would take 2 bytes for each of its parameters."""
    state, _, executable = compiled
    stack = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params["layers"]))
    head = 2 * CONFIG.vocab_size * CONFIG.d_model
    logits = 4 * 1024 * CONFIG.vocab_size
    assert executable.memory_analysis().temp_size_in_bytes < 2 * stack + 4 * head + 8 * logits


@pytest.mark.slow
def test_moments_kept_by_hand_are_donated_at_size():
    """Llama-3-70B: 24.6 GiB of parameters and moments a GPU, which would be there twice."""
    mesh, model = deepcompile.targets.h100(nodes=4).make_mesh((32,), ("fsdp",)), llama.Llama(llama.LLAMA3_70B)

    def create(key):
        params = model.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
        return {"p": params, "m": jax.tree.map(jnp.zeros_like, params), "v": jax.tree.map(jnp.zeros_like, params)}

    @deepcompile.shard(mesh, passes=())
    def step(state, tokens):
        def loss_of(params):
            return llama.next_token_loss(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])

        def adam(p, m, v):
            return p - 3e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * p)

        loss, grads = jax.value_and_grad(loss_of)(state["p"])
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], grads)
        return {"p": jax.tree.map(adam, state["p"], m, v), "m": m, "v": v}, loss

    state = jax.eval_shape(create, jax.random.key(0))
    traced = step.trace(state, jax.ShapeDtypeStruct((32, 2049), jnp.int32))
    memory = traced.lower().compile().memory_analysis()
    assert memory.alias_size_in_bytes / 2**30 == pytest.approx(24.6, abs=0.1)
    assert memory.argument_size_in_bytes - memory.alias_size_in_bytes < 2**20
