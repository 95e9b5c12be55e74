"""Layers that are updated in their backward loop, compiled for one H100: in place, with copies beside products."""

from __future__ import annotations

import optax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.lowering.compile import copies_at_once, peak_bytes
from tests.schedules import kernels_beside_copies, loop_bodies
from tests.transforms.programs import compiled_for_h100s, gated_loss, gated_shapes, sharded
from tests.transforms.test_update_in_loops import moments, updated

pytestmark = pytest.mark.h100_aot

LAYERS, WIDTH, HIDDEN, TOKENS = 16, 1024, 4096, 4096
STACK_BYTES = 4 * LAYERS * 3 * WIDTH * HIDDEN
"""Of all layers' parameters, or one of their moments."""


@pytest.fixture(scope="module")
def step():
    mesh = deepcompile.targets.h100(gpus_per_node=1).make_mesh((1,), ("fsdp",))
    return sharded(gated_loss, gated_shapes(LAYERS, WIDTH, HIDDEN), (TOKENS, WIDTH), mesh, optax.adamw(1e-3))


@pytest.fixture(scope="module")
def compiled(step):
    program, mesh = step
    return compiled_for_h100s(program, mesh), compiled_for_h100s(updated(program, mesh), mesh)


@pytest.fixture(scope="module")
def away(step):
    program, mesh = step
    return compiled_for_h100s(updated(program, mesh, 1, 1, moments), mesh, **copies_at_once())


def test_no_gradients_are_stacked(compiled):
    before, after = (peak_bytes(each.memory_analysis()) for each in compiled)
    assert before - after > 0.9 * STACK_BYTES


def test_stacks_are_updated_in_place(compiled):
    _, after = compiled
    assert after.memory_analysis().temp_size_in_bytes < STACK_BYTES, "a copy of a third would be there"


def test_moments_on_the_host_take_no_more_memory_there(away):
    memory = away.memory_analysis()
    assert memory.host_argument_size_in_bytes == pytest.approx(2 * STACK_BYTES, rel=0.01)
    assert memory.host_temp_size_in_bytes == 0
    assert memory.argument_size_in_bytes == pytest.approx(STACK_BYTES, rel=0.05)


def test_every_copy_in_the_loop_has_kernels_beside_it(away):
    (backward,) = filter(None, map(kernels_beside_copies, loop_bodies(read(away.as_text()))))
    assert len(backward) == 2 * 2 * 8, "of both moments of four stacks each way, in a body that runs two layers"
    assert sum(count >= 2 for count in backward) >= 0.8 * len(backward)


def test_so_it_is_in_the_second_run_of_a_loop():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh = deepcompile.targets.h100(gpus_per_node=1).make_mesh((1,), ("fsdp",))
    program, _ = sharded(gated_loss, gated_shapes(LAYERS, WIDTH, HIDDEN), (TOKENS, WIDTH), mesh, optimizer)
    before = compiled_for_h100s(program, mesh)
    after = compiled_for_h100s(updated(program, mesh, 1, 1, moments), mesh, **copies_at_once())
    saved = peak_bytes(before.memory_analysis()) - peak_bytes(after.memory_analysis())
    assert saved > 2.5 * STACK_BYTES, "no gradients, and no moments but those of layers in flight"
    (second,) = filter(None, map(kernels_beside_copies, loop_bodies(read(after.as_text()))))
    assert len(second) == 2 * 2 * 8
    assert sum(count >= 2 for count in second) >= 0.8 * len(second)
