"""Pipelined loops, compiled for H100s: stacks are neither transposed nor filled before they are used."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from tests.transforms.programs import compiled_for_h100s, h100s, sharded

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

    params = {"up": (LAYERS, EXPERTS, WIDTH, HIDDEN), "down": (LAYERS, EXPERTS, HIDDEN, WIDTH)}
    program, mesh = sharded(loss, params, (64, WIDTH), h100s(), optax.sgd(0.1))
    planned = LoopSchedule.apply(program, mesh, choose_schedules(program))
    return compiled_for_h100s(planned, mesh).as_text() or ""


@pytest.mark.parametrize("block", [(WIDTH // DEVICES, HIDDEN), (HIDDEN // DEVICES, WIDTH)], ids=["up", "down"])
def test_stacks_keep_their_layout(text, block):
    rows, columns = block
    layouts = re.findall(rf"f32\[{LAYERS},{EXPERTS},{rows},{columns}\]{{([\d,]+)", text)
    assert set(layouts) == {"3,2,1,0"}
    assert f"f32[{rows},{LAYERS},{EXPERTS},{columns}]" not in text


def test_stacks_of_results_begin_as_memory_alone(text):
    assert 'custom_call_target="AllocateBuffer"' in text
    assert re.findall(rf"%loop_broadcast_fusion\S* = f32\[{LAYERS},", text) == []
