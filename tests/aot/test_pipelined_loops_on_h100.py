"""Pipelined loops, compiled for H100s: stacks are neither transposed nor filled before they are used."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jax_deepcompile as deepcompile
from jax_deepcompile.lowering.compile import compile_options, double_buffering
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from tests.partition.steps import shapes, training_step

pytestmark = pytest.mark.h100_aot

LAYERS, EXPERTS, WIDTH, HIDDEN, DEVICES = 6, 4, 1024, 512, 8


@pytest.fixture(scope="module")
def text() -> str:
    """Of layers whose kernels, one for each of fewer experts than devices, are divided along their second dimension."""

    def layer(x, w):
        h = jnp.tanh(jnp.einsum("bd,edf->ebf", x, w["up"]))
        return x + jnp.einsum("ebf,efd->bd", h, w["down"]), None

    def loss(params, x):
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    params = shapes({"up": (LAYERS, EXPERTS, WIDTH, HIDDEN), "down": (LAYERS, EXPERTS, HIDDEN, WIDTH)})
    optimizer = optax.sgd(0.1)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    mesh = deepcompile.targets.h100().make_mesh((DEVICES,), ("fsdp",))
    step = deepcompile.shard(training_step(loss, optimizer), mesh, passes=())
    program = step.trace(state, shapes((64, WIDTH))).sharded
    planned = LoopSchedule.apply(program, mesh, choose_schedules(program))
    compiled = lower(planned, mesh, "cuda").compile(compiler_options=compile_options("cuda") | double_buffering())
    return compiled.as_text() or ""


@pytest.mark.parametrize("block", [(WIDTH // DEVICES, HIDDEN), (HIDDEN // DEVICES, WIDTH)], ids=["up", "down"])
def test_stacks_keep_their_layout(text, block):
    rows, columns = block
    layouts = re.findall(rf"f32\[{LAYERS},{EXPERTS},{rows},{columns}\]{{([\d,]+)", text)
    assert set(layouts) == {"3,2,1,0"}
    assert f"f32[{rows},{LAYERS},{EXPERTS},{columns}]" not in text


def test_stacks_of_results_begin_as_memory_alone(text):
    assert 'custom_call_target="AllocateBuffer"' in text
    assert re.findall(rf"%loop_broadcast_fusion\S* = f32\[{LAYERS},", text) == []
