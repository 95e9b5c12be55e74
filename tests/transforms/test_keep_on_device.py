"""What a step's own policies copy to the host stays on the device, the same bits; arguments and results stay there."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.ir.memory import is_fetch, is_offload
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.keep_on_device import KeptOnDevice
from jax_deepcompile.transforms.offload_activations import OffloadedActivations, offloadable
from jax_deepcompile.transforms.offload_state import OffloadedState, movable
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from tests.partition.steps import lines
from tests.transforms.programs import (
    MATRICES,
    WIDTH,
    assert_same_values,
    compiled_for_h100s,
    h100s,
    matrices_loss,
    sharded,
)

OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["sin"],
    offload_src="device",
    offload_dst="pinned_host",
)
KEEP = [KeptOnDevice()]


@partial(jax.checkpoint, policy=OFFLOADED)
def layer(x, w):
    h = checkpoint_name(jnp.sin(x @ w), "sin")
    return jnp.tanh(h @ w), None


def scanned_loss(params, batch):
    return jnp.mean(lax.scan(layer, batch, params["w"])[0] ** 2)


def unrolled_loss(params, batch):
    for w in params["w"]:
        batch, _ = layer(batch, w)
    return jnp.mean(batch**2)


CASES = {
    "scanned": (scanned_loss, {}),
    "unrolled": (unrolled_loss, {}),
    "microbatches": (scanned_loss, {"microbatches": 2}),
}


def copies(program) -> int:
    return sum(is_fetch(eqn) or is_offload(eqn) for eqn in equations(program.jaxpr))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("case", CASES)
def test_values_stay_the_same_and_nothing_is_copied(case):
    loss, options = CASES[case]
    program, mesh = sharded(loss, MATRICES, **options)
    kept = carry_out(program, mesh, KEEP)
    assert copies(program) > 0 == copies(kept)
    assert_same_values(kept, program, mesh)


@pytest.mark.cpu_mesh
def test_other_decisions_go_on_from_there():
    """By names that are those of a step without copies."""
    program, mesh = sharded(scanned_loss, MATRICES)
    kept = carry_out(program, mesh, KEEP)
    assert [each.name for each in offloadable(program, *_loops(program))] == ["w input"]
    names = tuple(each.name for each in offloadable(kept, *_loops(kept)))
    assert len(names) == 2
    away = OffloadedActivations("w @forward", "w @backward", names)
    schedules = choose_schedules(carry_out(program, mesh, [*KEEP, away]))
    planned = carry_out(program, mesh, [*KEEP, away, *schedules])
    assert schedules
    assert copies(planned) >= 4
    assert_same_values(planned, carry_out(program, mesh, [*KEEP, *schedules]), mesh)
    assert Plan.from_json(Plan("0", (*KEEP, away)).to_json()) == Plan("0", (*KEEP, away))


def _loops(program) -> tuple[Loop, ...]:
    return tuple(find_loops(program))


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(scanned_loss, MATRICES)
    here, there = f"f32[2,{WIDTH}]", f"f32<host>[2,{WIDTH}]"
    out, back = f"  device_put {here} -> {there}", f"  device_put {there} -> {here}"
    assert lines(program, ("device_put", "sin", "cos")) == [
        "scan 4",
        f"  sin {here} -> {here}",
        out,
        "scan 4",
        f"  cos {here} -> {here}",
        back,
    ]
    assert lines(carry_out(program, mesh, KEEP), ("device_put", "sin", "cos")) == [
        "scan 4",
        f"  sin {here} -> {here}",
        "scan 4",
        f"  cos {here} -> {here}",
    ]


@pytest.mark.pure
def test_what_copies_nothing_stays():
    program, mesh = sharded(matrices_loss, MATRICES)
    assert KeptOnDevice.apply(program, mesh, KEEP) is program


@pytest.mark.pure
def test_a_state_on_the_host_stays_there():
    program, mesh = sharded(matrices_loss, MATRICES)
    away = carry_out(program, mesh, [OffloadedState(tuple(movable(program).values()))])
    assert copies(away) > 0
    assert KeptOnDevice.apply(away, mesh, KEEP) is away


@pytest.mark.h100_aot
def test_compiled_nothing_is_on_the_host_and_loops_do_not_wait():
    program, mesh = sharded(scanned_loss, MATRICES, mesh=h100s())
    kept = carry_out(program, mesh, KEEP)
    planned = LoopSchedule.apply(kept, mesh, choose_schedules(kept))
    texts = [compiled_for_h100s(each, mesh).as_text() for each in (program, planned)]
    assert ["S(5)" in text for text in texts] == [True, False]
