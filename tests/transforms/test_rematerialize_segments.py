"""What backward reads of layers that no loop runs is computed again to the same bits, as if they were checkpointed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jax_deepcompile.analysis.names import value_names
from jax_deepcompile.analysis.segments import Tape
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.costs.program_memory import memory_of_program
from jax_deepcompile.ir.program import Program
from jax_deepcompile.lowering.compile import stacks_in_turn
from jax_deepcompile.planner.recomputation import find_recomputation
from jax_deepcompile.transforms import carry_out
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.rematerialize_segments import RematerializedSegments, segments_of
from tests.cases import but_slow, examples
from tests.transforms.programs import (
    LAYERS,
    STACK,
    WIDTH,
    assert_same_values,
    compiled_for_h100s,
    count,
    h100s,
    in_two_iterations,
    outline,
    sharded,
    stack_loss,
)

BATCH = (128, WIDTH)
TWO = {name: {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)} for name in ("a", "b")}


def two_blocks_loss(params, batch):
    for name in "ab":
        batch = batch + jnp.tanh(batch @ params[name]["up"]) @ params[name]["down"]
    return jnp.mean(batch**2)


def gradient_penalty_loss(params, batch):
    """Backward reads what backward of an inner gradient made of parameters."""

    def critic(x):
        for name in "ab":
            x = x + jnp.tanh(x @ params[name]["up"]) @ params[name]["down"]
        return jnp.sum(x)

    made = batch + jnp.tanh(batch @ params["a"]["up"]) @ params["a"]["down"]
    slopes = jax.vmap(jax.grad(critic))((batch + made) / 2)
    return 1e-3 * (critic(made) - critic(batch)) + jnp.mean((jnp.linalg.norm(slopes + 1e-6, axis=-1) - 1) ** 2)


def layer(x, params):
    h = jnp.tanh(x @ params["up"] + params["bias"])
    return x + jnp.sin(h) * jnp.cos(h) @ params["down"]


def unrolled(body, start=lambda batch: batch, end=lambda carry: carry):
    """The loss of ``LAYERS`` layers written one by one, without checkpoint."""

    def loss(params, batch):
        carry = start(batch)
        for place in range(LAYERS):
            carry = body(carry, {name: stack[place] for name, stack in params["stack"].items()}, place)
        return jnp.mean(end(carry) ** 2)

    return loss


def masked(carry, params, place):
    """A mask that all layers read, made before the first."""
    x, mask = carry
    return layer(x, params) * mask, mask


def dropped(x, params, place):
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), place), 0.8, x.shape)
    return jnp.where(keep, layer(x, params), 0)


def normalised(x, params, place):
    """By means over the whole batch, which is divided."""
    x = layer(x, params)
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-3)


def down_and_up(carry, params, place):
    """A U: later layers read what earlier ones left."""
    x, left = carry
    x = layer(x, params)
    return (x + left[-1], left[:-1]) if place > LAYERS // 2 else (x, [*left, x])


def checkpointed(x, params, place):
    return jax.checkpoint(layer)(x, params) if place % 2 else layer(x, params)


def looped(x, params, place):
    return lax.scan(lambda h, _: (layer(h, params), None), x, length=2)[0] + jnp.sin(layer(x, params))


@jax.custom_vjp
def squared(x):
    return x * x


squared.defvjp(lambda x: (x * x, x), lambda x, g: (2.0 * x * g,))


def inner_gradient(x, params, place):
    """Of forward some follows a gradient."""
    return layer(x, params) + jax.grad(lambda x: jnp.sum(jnp.sin(layer(x, params)) ** 2))(x)


LOSSES = {
    "own gradient": unrolled(lambda x, params, place: squared(layer(x, params))),
    "inner gradient": unrolled(inner_gradient),
    "layers": unrolled(lambda x, params, place: layer(x, params)),
    "mask": unrolled(masked, lambda x: (x, x.sum(-1, keepdims=True) > 0), lambda carry: carry[0]),
    "dropout": unrolled(dropped),
    "norm over the batch": unrolled(normalised),
    "U": unrolled(down_and_up, lambda x: (x, [x]), lambda carry: carry[0]),
    "some checkpointed": unrolled(checkpointed),
    "loops inside": unrolled(looped),
    "bfloat16": unrolled(
        lambda x, params, place: layer(x, jax.tree.map(lambda leaf: leaf.astype(x.dtype), params)),
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x.astype(jnp.float32),
    ),
}
PLAIN = LOSSES["layers"]


def remade(program: Program, mesh, with_loops: bool = False) -> Program:
    return carry_out(program, mesh, [choice for choice, _ in segments_of(program, with_loops)])


def live_bytes(program: Program) -> int:
    return memory_of_program(program).live_peak_bytes


@pytest.mark.pure
def test_before_and_after():
    program, mesh = sharded(two_blocks_loss, TWO, (1024, WIDTH))
    gather, product, reduce = "all_gather", "dot_general", "reduce_scatter"
    forward = 2 * [gather, product, "tanh", gather, product]
    head = [product, reduce, product, product, reduce]
    rest = [product, reduce, gather, product, product, reduce]
    assert outline(program, "tanh") == [*forward, *head, gather, product, *rest]
    ((choice, remade_values),) = segments_of(program)
    assert choice.inputs == ("two_blocks_loss add @forward",)
    assert remade_values[0] == "two_blocks_loss tanh @forward"
    again = [gather, product, "tanh"]
    assert outline(remade(program, mesh), "tanh") == [*forward, *head, gather, product, *again, *rest]


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(
    "name", but_slow(LOSSES, ["own gradient", "layers", "mask", "norm over the batch", "bfloat16"])
)
def test_values_stay_the_same_in_less_memory(name):
    program, mesh = sharded(LOSSES[name], STACK, BATCH)
    after = remade(program, mesh)
    assert live_bytes(after) < live_bytes(program)
    assert count(after, "reduce_scatter") == count(program, "reduce_scatter")
    assert_same_values(after, program, mesh)


@pytest.mark.cpu_mesh
def test_what_backward_makes_of_parameters_is_read_under_its_new_name():
    program, mesh = sharded(gradient_penalty_loss, TWO, BATCH)
    after = remade(program, mesh)
    assert after is not program
    assert_same_values(after, program, mesh)


@pytest.mark.cpu_mesh
def test_loops_inside_of_layers_are_computed_again_as_a_whole():
    program, mesh = sharded(LOSSES["loops inside"], STACK, BATCH)
    after = remade(program, mesh, with_loops=True)
    assert live_bytes(after) < 0.9 * live_bytes(remade(program, mesh))
    assert count(after, "scan") == count(program, "scan") + LAYERS - 1
    assert "with the loops inside" in next(choice for choice, _ in segments_of(program, with_loops=True)).describe()
    assert_same_values(after, program, mesh)


@pytest.mark.cpu_mesh
@pytest.mark.parametrize("of", but_slow(["two iterations", "microbatches"], ["two iterations"]))
def test_inside_of_a_loop_values_stay_the_same(of):
    if of == "microbatches":
        program, mesh = sharded(PLAIN, STACK, BATCH, microbatches=2)
    else:
        program, mesh = sharded(in_two_iterations(PLAIN), STACK, BATCH)
    choices = [choice for choice, _ in segments_of(program) if choice.where]
    assert len(choices) == 1
    after = carry_out(program, mesh, choices)
    assert live_bytes(after) < live_bytes(program)
    assert_same_values(after, program, mesh)


@pytest.mark.cpu_mesh
@examples(2)
@given(st.sampled_from(sorted(LOSSES)), st.randoms(use_true_random=False))
def test_whatever_is_kept_values_stay_the_same(name, random):
    """From any values of forward, not only from those that save most."""
    program, mesh = sharded(LOSSES[name], STACK, BATCH)
    with_loops = random.random() < 0.5
    tape, names = Tape(program.jaxpr.jaxpr, with_loops), value_names(program.jaxpr, phased=True)
    known = [names[var] for var in tape.makers if var in names]
    inputs = tuple(random.sample(known, random.randint(1, 9)))
    after = carry_out(program, mesh, [RematerializedSegments("", inputs, with_loops)])
    for region in find_recomputation(after, CostModel()):
        kept = [each for each in region.names if random.random() < 0.5]
        after = carry_out(after, mesh, [KeptActivations(*region.loops, tuple(kept))]) if kept else after
    assert_same_values(after, program, mesh)


@pytest.mark.cpu_mesh
def test_what_was_kept_can_be_kept_again():
    program, mesh = sharded(PLAIN, STACK, BATCH)
    after = remade(program, mesh)
    (region,) = find_recomputation(after, CostModel())
    kept = carry_out(after, mesh, [KeptActivations(*region.loops, region.names)])
    assert count(after, "dot_general") > count(program, "dot_general")
    assert count(kept, "dot_general") == count(program, "dot_general")
    assert_same_values(kept, program, mesh)


@pytest.mark.h100_aot
def test_compiled_it_takes_less_memory():
    """XLA merges nothing of what is computed again with what was computed before."""
    wide = {"up": (LAYERS, 512, 2048), "bias": (LAYERS, 2048), "down": (LAYERS, 2048, 512)}
    program, mesh = sharded(PLAIN, {"stack": wide}, (1 << 15, 512), h100s())
    compiled = [compiled_for_h100s(each, mesh).memory_analysis() for each in (program, remade(program, mesh))]
    before, after = (each.temp_size_in_bytes for each in compiled)
    assert after < 0.6 * before


@pytest.mark.h100_aot
def test_loops_that_are_computed_again_take_memory_in_turn():
    """What they stack up, that is; XLA merges nothing here either."""

    def over_parts(x, params, place):
        parts = x.reshape(-1, 8, x.shape[-1]).swapaxes(0, 1)
        made = lax.scan(lambda none, part: (none, layer(part, params)), None, parts)[1]
        return made.swapaxes(0, 1).reshape(x.shape)

    wide = {"up": (LAYERS, 512, 2048), "bias": (LAYERS, 2048), "down": (LAYERS, 2048, 512)}
    program, mesh = sharded(unrolled(over_parts), {"stack": wide}, (1 << 15, 512), h100s())
    again = remade(program, mesh, with_loops=True)
    compiled = [compiled_for_h100s(program, mesh), compiled_for_h100s(again, mesh, **stacks_in_turn())]
    before, after = (each.memory_analysis().temp_size_in_bytes for each in compiled)
    assert after < 0.6 * before


@pytest.mark.pure
@pytest.mark.parametrize(
    "loss",
    [stack_loss, lambda params, batch: jnp.mean((batch @ params["stack"]["up"][0]) ** 2)],
    ids=["layers in a loop", "one layer"],
)
def test_there_is_nothing_to_compute_again(loss):
    program, _ = sharded(loss, STACK, BATCH)
    assert list(segments_of(program)) == []
