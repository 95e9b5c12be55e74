"""What the forward loop saves gathered computes the same bits, and is gathered by it alone."""

from __future__ import annotations

import optax
import pytest

from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.stacks import sliced_gathers
from jax_deepcompile.hlo.reader import read
from jax_deepcompile.transforms.pipeline_loops import LoopSchedule, choose_schedules
from jax_deepcompile.transforms.save_gathered import SavedGathers, shared_gathers, shared_names
from tests.cases import in_turn
from tests.schedules import gathers, loop_bodies
from tests.transforms.programs import (
    LAYERS,
    MATRICES,
    STACK,
    WIDTH,
    assert_same_values,
    backwards_loss,
    compiled_for_h100s,
    count,
    h100s,
    in_two_iterations,
    inner_loops,
    matrices_loss,
    outline,
    sharded,
    stack_loss,
    stack_shapes,
    two_products_loss,
    two_stacks_loss,
)


def everything(program, loops=find_loops) -> SavedGathers:
    """From the last forward loop to the first backward one, all that both gather."""
    gathering = [loop for loop in loops(program) if sliced_gathers(loop.eqn)]
    middle = len(gathering) // 2
    forward, backward = gathering[middle - 1], gathering[middle]
    names = shared_names(program, forward, shared_gathers(program, forward, backward))
    return SavedGathers(forward.name, backward.name, tuple(names))


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    ("loss", "params", "pipelined"),
    in_turn(
        {
            "forward": (stack_loss, STACK),
            "reverse": (backwards_loss, STACK),
            "two stacks": (two_stacks_loss, {"a": stack_shapes(3), "b": stack_shapes()}),
        },
        {"plain": False, "pipelined": True},
    ),
)
def test_values_stay_the_same(loss, params, pipelined):
    program, mesh = sharded(loss, params)
    saved = SavedGathers.apply(program, mesh, [everything(program)])
    if pipelined:
        saved = LoopSchedule.apply(saved, mesh, choose_schedules(program))
    assert count(saved, "all_gather") == count(program, "all_gather") - 3 * LAYERS
    assert_same_values(saved, program, mesh)


@pytest.mark.cpu_mesh
def test_inside_of_another_loop_values_stay_the_same():
    program, mesh = sharded(in_two_iterations(stack_loss), STACK)
    saved = SavedGathers.apply(program, mesh, [everything(program, inner_loops)])
    assert count(saved, "all_gather") < count(program, "all_gather")
    assert_same_values(saved, program, mesh)


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(matrices_loss, MATRICES)
    gather, product, reduce = "  all_gather", "  dot_general", "  reduce_scatter"
    backward = [product, product, reduce, product]
    assert outline(program) == ["scan 4", gather, product, "scan 4", gather, *backward]
    saved = SavedGathers.apply(program, mesh, [everything(program)])
    assert outline(saved) == ["scan 4", gather, product, "scan 4", *backward]
    _, reader = find_loops(saved)
    assert (4, WIDTH, WIDTH) in [var.aval.shape for var in reader.eqn.invars]


@pytest.mark.pure
def test_some_of_them_is_enough():
    program, mesh = sharded(stack_loss, STACK)
    saved = SavedGathers.apply(program, mesh, [SavedGathers("stack @forward", "stack @backward", ("stack/bias",))])
    assert count(saved, "all_gather") == count(program, "all_gather") - LAYERS


@pytest.mark.pure
def test_loops_over_different_layers_share_nothing():
    program, _ = sharded(two_stacks_loss, {"a": stack_shapes(), "b": stack_shapes()})
    first, second, *_ = (loop for loop in find_loops(program) if sliced_gathers(loop.eqn))
    assert shared_gathers(program, first, second).gathers == ()


@pytest.mark.h100_aot
def test_backward_gathers_less_for_one_stack_of_memory_and_no_more():
    """The stack of 6 x 1024 x 4096 floats lies once in memory, gathered along its second dimension though it is."""
    layers, width = 6, 1024
    params = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    program, mesh = sharded(two_products_loss, params, (64, width), h100s(), optax.sgd(0.1))

    def compiled(choices):
        saved = SavedGathers.apply(program, mesh, choices)
        return compiled_for_h100s(LoopSchedule.apply(saved, mesh, choose_schedules(saved)), mesh)

    loops = [loop.name for loop in find_loops(program)]
    before, after = compiled([]), compiled([SavedGathers(*loops, ("up",))])
    bodies = [loop_bodies(read(each.as_text())) for each in (before, after)]
    forward_and_backward = [[gathers(body.instructions) for body in each] for each in bodies]
    assert forward_and_backward == [[4, 4], [4, 2]], "two iterations in a body"
    more = after.memory_analysis().temp_size_in_bytes - before.memory_analysis().temp_size_in_bytes
    assert more < 1.25 * 4 * layers * width * 4 * width
