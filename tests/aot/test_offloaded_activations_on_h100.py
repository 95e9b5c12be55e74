"""Activations on the host, compiled for H100s: copies run beside compute, the device has a few layers'."""

from __future__ import annotations

from typing import NamedTuple

import optax
import pytest

from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.hlo.reader import Module, read
from jax_deepcompile.lowering.compile import compile_options, double_buffering, peak_bytes
from jax_deepcompile.lowering.emit import lower
from jax_deepcompile.planner.layers import copying_ahead, pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import find_recomputation
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.offload_activations import OffloadedActivations
from jax_deepcompile.transforms.pipeline_loops import choose_schedules
from tests.schedules import instructions, loop_bodies, products_beside_copies
from tests.transforms.programs import compiled_for_h100s, gated_loss, gated_shapes, h100s, sharded
from tests.transforms.test_offload_activations import CASES, all_kept, all_offloaded

pytestmark = pytest.mark.h100_aot

LAYERS, WIDTH, HIDDEN, TOKENS = 8, 1024, 4096, 8192
LAYER_BYTES = 2 * TOKENS * (WIDTH + 2 * HIDDEN)
"""The layer's input and what two products make of it, in bfloat16."""


class Compiled(NamedTuple):
    module: Module
    device_bytes: int
    host_bytes: int


@pytest.fixture(scope="module")
def kept_and_away() -> tuple[Compiled, Compiled]:
    """A stack of gated layers that keeps what two products make: on the device, and on the host."""
    sizes = gated_shapes(LAYERS, WIDTH, HIDDEN)
    program, mesh = sharded(gated_loss, sizes, (8 * TOKENS, WIDTH), h100s(), optax.sgd(0.1))
    (turn,) = find_recomputation(program, CostModel())
    products = tuple(name for name in turn.names if "dot_general" in name)
    kept = KeptActivations(*turn.loops, products)
    away = OffloadedActivations(*turn.loops, (*products, *(each.name for each in turn.residuals)))

    def compiled(plan: Plan) -> Compiled:
        options = compile_options("cuda") | dict(plan.options)
        found = lower(plan.program(program, mesh), mesh, "cuda").compile(compiler_options=options)
        memory = found.memory_analysis()
        assert memory is not None
        return Compiled(read(found.as_text() or ""), peak_bytes(memory), memory.host_temp_size_in_bytes)

    plan = pipelined(Plan("0", (kept,)).replace(options=double_buffering()), program, choose_schedules(program))
    return compiled(plan), compiled(copying_ahead(Plan("0", (kept, away)), program, mesh))


def test_every_copy_in_a_loop_has_products_beside_it(kept_and_away):
    kept, away = kept_and_away
    assert not any(map(products_beside_copies, loop_bodies(kept.module)))
    forward, backward = filter(None, map(products_beside_copies, loop_bodies(away.module)))
    for copies in (forward, backward):
        assert len(copies) == 3 * 2, "of each value, in a body that runs two layers"
        assert min(copies) >= 3


def test_the_host_has_what_the_plan_says(kept_and_away):
    kept, away = kept_and_away
    assert kept.host_bytes == 0
    assert away.host_bytes == pytest.approx(LAYERS * LAYER_BYTES, rel=0.03)


def test_the_device_has_that_much_less_but_for_a_few_layers(kept_and_away):
    kept, away = kept_and_away
    assert (LAYERS - 3) * LAYER_BYTES < kept.device_bytes - away.device_bytes < LAYERS * LAYER_BYTES


def test_nothing_is_computed_on_the_host(kept_and_away):
    _, away = kept_and_away
    assert computed_on_host(away.module) == []


def computed_on_host(module: Module) -> list[str]:
    return [each.name for each in instructions(module) if '_xla_compute_type="host"' in each.attributes]


@pytest.mark.parametrize("case", ["a barrier between", "two stacks", "down and up", "loop in a loop"])
def test_loops_of_whatever_form_compile(case):
    loss, params, options = CASES[case]
    program, mesh = sharded(loss, params, mesh=h100s(), **options)
    kept = all_kept(program)
    plan = copying_ahead(Plan("0", (*kept, *all_offloaded(program, kept, mesh))), program, mesh)
    assert computed_on_host(read(compiled_for_h100s(plan.program(program, mesh), mesh).as_text() or "")) == []
