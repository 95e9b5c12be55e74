"""Four microbatches of a Llama train step compiled for 32 H100s: what they take, next to a step with one."""

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

CONFIG = dataclasses.replace(llama.LLAMA3_70B, n_layers=4)
DEVICES, LENGTH = 32, 1024


@pytest.fixture(scope="module")
def compile_step():
    mesh = deepcompile.targets.h100(nodes=4).make_mesh((DEVICES,), ("fsdp",))
    gradients, state = llama_gradients(CONFIG, by_hand=False)

    def compiled(microbatches: int, examples: int):
        sharded = deepcompile.shard(training_step(gradients), mesh, microbatches=microbatches, passes=())
        tokens = jax.ShapeDtypeStruct((examples * DEVICES, LENGTH + 1), jnp.int32)
        return state, sharded.trace(state, tokens).lower().compile()

    return compiled


def test_four_microbatches_take_the_memory_of_one_and_a_shard_of_gradients(compile_step):
    """The shard of the gradients in float32, and once more in bfloat16: the stack of layers that is being added.

    Some versions of XLA also keep the whole gradient of the last product until the layers are done.
    """
    state, one = compile_step(1, 1)
    _, four = compile_step(4, 4)
    shard = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)) / DEVICES
    more = four.memory_analysis().temp_size_in_bytes - one.memory_analysis().temp_size_in_bytes
    assert more < 1.6 * shard + 2 * CONFIG.vocab_size * CONFIG.d_model
    text = four.as_text()
    assert " all-to-all" not in text
    for line in re.findall(r"= (.*) all-reduce(?:-start)?\(", text):
        assert all(math.prod(map(int, dims.split(","))) <= 8 for dims in re.findall(r"\w+\[([\d,]+)\]", line)), line
