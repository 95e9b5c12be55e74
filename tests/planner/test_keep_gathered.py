"""On CPU devices loops gather once what they need in every iteration, as far as memory goes."""

from __future__ import annotations

import jax
import pytest

import jax_deepcompile as deepcompile
from jax_deepcompile.analysis.gathers import hoistable_gathers
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.planner.layers import keep_gathered
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names
from tests.partition.steps import shapes
from tests.planner.situations import MICROBATCHES, START, UNROLLED, accumulating, unrolled_loss
from tests.transforms.programs import BATCH, WIDTH, assert_same_values, count, sharded, stack_loss, stack_shapes

ROOM_BYTES = 1 << 30


def hoistable(program):
    (loop,) = [loop for loop in find_loops(program) if hoistable_gathers(loop.eqn)]
    return loop, hoistable_gathers(loop.eqn)


@pytest.mark.cpu_mesh
def test_a_loop_over_microbatches_gathers_once_and_computes_the_same_bits():
    program, mesh = accumulating(unrolled_loss, UNROLLED)
    loop, _ = hoistable(program)
    kept = keep_gathered(program, ROOM_BYTES)
    assert kept == (KeptGathers(loop.name, tuple(hoistable_names(program, loop))),)
    planned = START.having(KeptGathers, kept).program(program, mesh)
    assert hoistable_gathers(next(each for each in find_loops(planned) if each.name == loop.name).eqn) == ()
    assert count(planned, "all_gather") < count(program, "all_gather")
    assert_same_values(planned, program, mesh)


@pytest.mark.pure
def test_each_value_counts_once_and_what_does_not_fit_is_gathered_again():
    program, _ = accumulating(unrolled_loss, UNROLLED)
    _, gathers = hoistable(program)
    sizes = {gather.key: gather.size_bytes for gather in gathers}
    assert len(sizes) < len(gathers)
    (every,) = keep_gathered(program, sum(sizes.values()))
    (some,) = keep_gathered(program, sum(sizes.values()) - 1)
    assert len(every.gathers) == len(gathers)
    assert 0 < len(some.gathers) < len(gathers)
    assert keep_gathered(program, 0) == ()


@pytest.mark.pure
@pytest.mark.parametrize(("loss", "params"), [(unrolled_loss, UNROLLED), (stack_loss, {"stack": stack_shapes()})])
def test_nothing_is_decided_where_no_loop_repeats_a_gather(loss, params):
    program, _ = sharded(loss, params)
    assert keep_gathered(program, ROOM_BYTES) == ()


def microbatched(**options):
    def step(params, batch):
        loss, gradients = jax.value_and_grad(unrolled_loss)(params, batch)
        return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients), loss

    return deepcompile.shard(step, {"fsdp": 8}, microbatches=MICROBATCHES, **options).trace(
        shapes(UNROLLED), shapes((BATCH * MICROBATCHES, WIDTH))
    )


@pytest.mark.pure
def test_it_is_the_default_on_cpu_devices_and_no_passes_means_none():
    traced = microbatched()
    assert traced.plan().of(KeptGathers)
    assert traced.planned is not traced.sharded
    assert "the cost model says how many are worth it" in traced.explain()
    bare = microbatched(passes=())
    assert str(bare.plan()) == "fully sharded, nothing more"
    assert bare.planned is bare.sharded
