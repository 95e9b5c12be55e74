"""What plans call the parts of a program: one name for each, whatever else the program has and becomes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import find_loops, reduces_gradients
from jax_deepcompile.analysis.names import gather_names, numbered, parameter_names, value_names
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.ir.program import Program
from jax_deepcompile.planner.layers import keep_gathered, pipelined
from jax_deepcompile.planner.plan import Plan
from jax_deepcompile.planner.recomputation import find_recomputation
from jax_deepcompile.transforms import TRANSFORMS
from jax_deepcompile.transforms.delay_reductions import DelayedReductions, sum_names
from jax_deepcompile.transforms.keep_activations import KeptActivations
from jax_deepcompile.transforms.keep_gathered import KeptGathers, hoistable_names
from jax_deepcompile.transforms.microbatch_loops import MicrobatchLoop
from jax_deepcompile.transforms.pipeline_loops import choose_schedules
from jax_deepcompile.transforms.prefetch import parameter_gathers
from jax_deepcompile.transforms.save_gathered import SavedGathers
from jax_deepcompile.transforms.stack_collectives import StackCollectives, slice_names, stacked_names
from jax_deepcompile.transforms.unshard import repeated_gathers
from models import llama, mixtral
from tests.partition.steps import shapes, trace
from tests.transforms.programs import (
    BATCH,
    MATRICES,
    STACK,
    WIDTH,
    inner_loops,
    loop_names,
    matrices_loss,
    outer_loops,
    run_stack,
    sharded,
    stack_loss,
    stack_shapes,
)
from tests.transforms.test_keep_activations import inner_loop_loss
from tests.transforms.test_unshard import accumulating

pytestmark = pytest.mark.pure

FORWARD, BACKWARD = "layers @forward", "layers @backward"
TOKENS = jax.ShapeDtypeStruct((16, 17), jnp.int32)


def traced(step: Callable, *args, **options) -> Program:
    return deepcompile.shard(step, {"fsdp": 8}, **options).trace(*args).sharded


def linen(model: nn.Module, loss: Callable, batch: jax.ShapeDtypeStruct, microbatches: int = 1) -> Program:
    """The step of a train state on ``loss(apply, params, batch)``."""

    def create(batch):
        params = model.init(jax.random.key(0), batch[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    def step(state, batch):
        value, grads = jax.value_and_grad(lambda params: loss(model.apply({"params": params}, batch), batch))(
            state.params
        )
        return state.apply_gradients(grads=grads), value

    return traced(step, jax.eval_shape(create, batch), batch, microbatches=microbatches)


@functools.cache
def scanned(microbatches: int = 1) -> Program:
    config = dataclasses.replace(llama.LLAMA_TINY, vocab_size=64, n_layers=6, n_kv_heads=4)
    return linen(llama.Llama(config), llama.next_token_loss, jax.ShapeDtypeStruct((16, 16), jnp.int32), microbatches)


@functools.cache
def objects() -> Program:
    def create():
        model = mixtral.Mixtral(mixtral.MIXTRAL_TINY, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def step(model, optimizer, tokens):
        def loss_of(model):
            logits, balance = model(tokens[:, :-1])
            return mixtral.next_token_loss(logits, tokens[:, 1:]) + balance

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return traced(step, *nnx.eval_shape(create), TOKENS)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(jnp.tanh(nn.Dense(32, use_bias=False, name="up")(x)))


class Blocks(nn.Module):
    """Blocks one by one, and a last layer of some name."""

    last: str = ""

    @nn.compact
    def __call__(self, x):
        for index in range(2):
            x = nn.remat(Block)(name=f"block_{index}")(x)
        return nn.Dense(WIDTH, use_bias=False, name=self.last)(x) if self.last else x


@functools.cache
def unrolled(last: str = "head") -> Program:
    return linen(Blocks(last), lambda y, _: jnp.mean(y**2), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))


@functools.cache
def two_trees() -> Program:
    def step(student, teacher, batch):
        def loss(both):
            return jnp.mean(run_stack(both[0]["stack"], run_stack(both[1]["stack"], batch)) ** 2)

        return jax.tree.map(lambda leaf, grad: leaf - grad, (student, teacher), jax.grad(loss)((student, teacher)))

    trees = shapes(STACK), shapes({"stack": stack_shapes(3)})
    return traced(step, *trees, shapes((BATCH, WIDTH)), state_argnums=(0, 1))


@functools.cache
def adapted() -> Program:
    """One loop reads layers of two trees, of which one is frozen."""

    def step(adapters, frozen, batch):
        def loss(adapters):
            def layer(x, w):
                return x + jnp.tanh(x @ w[0]["up"]) @ w[1]["down"], None

            return jnp.mean(jax.lax.scan(layer, batch, (frozen["stack"], adapters["stack"]))[0] ** 2)

        return jax.tree.map(jnp.subtract, adapters, jax.grad(loss)(adapters)), frozen

    trees = shapes({"stack": {"down": (5, 32, WIDTH)}}), shapes({"stack": {"up": (5, WIDTH, 32)}})
    return traced(step, *trees, shapes((BATCH, WIDTH)), state_argnums=(0, 1))


@functools.cache
def plain() -> Program:
    return sharded(stack_loss, STACK)[0]


@functools.cache
def one_parameter() -> Program:
    return sharded(matrices_loss, MATRICES)[0]


@functools.cache
def own_accumulation() -> Program:
    return accumulating(stack_loss, STACK)[0]


LOOPS = {
    scanned: [FORWARD, BACKWARD],
    functools.partial(scanned, 2): [FORWARD, BACKWARD, "microbatches"],
    objects: [FORWARD, BACKWARD],
    unrolled: [],
    plain: ["stack @forward", "stack @backward"],
    one_parameter: ["w @forward", "w @backward"],
    two_trees: [
        "teacher/stack @forward",
        "student/stack @forward",
        "student/stack @backward",
        "teacher/stack @backward",
    ],
    adapted: ["stack @forward", "stack @backward"],
    own_accumulation: ["stack @forward", "stack @backward", "step"],
}
every_program = pytest.mark.parametrize(
    ("make", "loops"),
    LOOPS.items(),
    ids=[
        "Linen",
        "microbatches",
        "NNX",
        "unrolled",
        "plain",
        "one parameter",
        "two trees",
        "adapters",
        "own accumulation",
    ],
)


@every_program
def test_loops_are_called_by_their_layers_or_their_function(make, loops):
    of_layers = [name for name in loop_names(make()) if not name.startswith(("loop", "MixtureOfExperts"))]
    assert of_layers == loops


@every_program
def test_names_are_unique(make, loops):
    program = make()
    named = [loop_names(program), parameter_names(program), gather_names(program, (), parameter_gathers(program))]
    named += [list(value_names(jaxpr, phased).values()) for jaxpr in bodies(program) for phased in (False, True)]
    named += [names(program, loop) for loop in find_loops(program) for names in (slice_names, hoistable_names)]
    assert sum(map(len, named))
    for names in named:
        assert sorted(names) == sorted(set(names))
        assert all(names)


def bodies(program: Program) -> list:
    return [program.jaxpr, *(loop.eqn.params["jaxpr"] for loop in find_loops(program))]


@every_program
def test_a_reduction_is_called_as_the_gather_of_its_parameter(make, loops):
    program = make()
    reduced = {loop.name: stacked_names(program, loop) for loop in find_loops(program)}
    for loop in find_loops(program):
        trained = {name for name in slice_names(program, loop) if not name.startswith("frozen")}
        assert set(reduced[loop.name]) in (set(), trained)
    assert [name for name in loops if reduced[name]] == [name for name in loops if name.endswith("@backward")]
    for loop in find_loops(program):
        sums = list(sum_names(program, loop))
        assert set(sums) <= set(parameter_names(program))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gathers_are_called_by_parameter_paths(microbatches):
    program = scanned(microbatches)
    parameters = [name for name in parameter_names(program) if name.startswith("layers/")]
    assert "layers/mlp/up/kernel" in parameters
    for name in (FORWARD, BACKWARD):
        (loop,) = (each for each in find_loops(program) if each.name == name)
        assert sorted(slice_names(program, loop)) == sorted(parameters)


def test_a_backward_loop_that_reads_what_the_forward_one_cast():
    """Without ``jax.checkpoint`` the layers' matrices come to it as the forward loop kept them."""

    def loss(p, batch):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        x, _ = jax.lax.scan(layer, batch["x"].astype(jnp.bfloat16), p["layers"]["w"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    program = trace(lambda p, b: (jax.grad(loss)(p, b), 0.0), {"layers": {"w": (4, 64, 64)}}, {"x": (16, 64)}).sharded
    assert loop_names(program) == [FORWARD, BACKWARD]


def test_outside_of_layers_gathers_have_their_phase():
    once = ["embed/embedding @forward", "final_norm/scale @forward", "lm_head/kernel @forward"]
    again = ["final_norm/scale @backward"]
    assert gather_names(scanned(), (), parameter_gathers(scanned())) == [*once, *again]
    assert list(repeated_gathers(scanned())) == again
    (outer,) = outer_loops(scanned(2))
    assert hoistable_names(scanned(2), outer) == [*once, *again]


def test_nnx_objects_are_called_as_their_arguments():
    names = dict(zip((port.path for port in objects().inputs), parameter_names(objects()), strict=True))
    assert names["model['layers']['experts']['router']['kernel'].value"] == ("layers/experts/router/kernel")
    assert names["optimizer['opt_state'][0]['count'].value"] == "optimizer/opt_state/0/count"


def names_beside(program: Program, module: str) -> list[str]:
    """Of loops, gathers and values, but for those of ``module``."""
    found = [*loop_names(program), *gather_names(program, (), parameter_gathers(program))]
    found += [name for loop in find_loops(program) for name in slice_names(program, loop)]
    found += value_names(program.jaxpr, phased=True).values()
    return [name for name in found if module not in re.split("[/ ]", name)]


@pytest.mark.parametrize("last", ["head", "a", "zebra"])
def test_another_module_changes_no_names(last):
    def loss(params, batch):
        y = run_stack(params["stack"], batch)
        return jnp.mean((y @ params[last] if last in params else y) ** 2)

    alone, beside = (sharded(loss, STACK | more)[0] for more in ({}, {last: (WIDTH, WIDTH)}))
    assert loop_names(beside) == loop_names(alone)
    for one, other in zip(find_loops(alone), find_loops(beside), strict=True):
        assert slice_names(beside, other) == slice_names(alone, one)
        assert stacked_names(beside, other) == stacked_names(alone, one)


@pytest.mark.parametrize("last", ["tail", "a"])
def test_what_another_module_is_called_is_of_no_matter(last):
    assert names_beside(unrolled(last), last) == names_beside(unrolled("head"), "head")
    assert list(repeated_gathers(unrolled(last))) == list(repeated_gathers(unrolled("")))


def test_values_are_called_by_their_scope():
    names = list(value_names(unrolled().jaxpr, phased=True).values())
    for index in range(2):
        assert f"Blocks/block_{index}/up dot_general @forward" in names
        assert f"Blocks/block_{index} tanh @forward" in names
        assert f"Blocks/block_{index}/up dot_general @backward" in names
        assert f"Blocks/block_{index}/down reduce_scatter @backward" in names
    assert "Blocks/head dot_general @backward" in names


def test_values_without_a_scope_are_called_by_their_function():
    body = open_jaxpr(next(loop.eqn for loop in find_loops(plain())).params["jaxpr"])
    names = [name for name in value_names(body).values() if name.endswith(("dot_general", "dot_general #2", "tanh"))]
    assert names == ["layer dot_general", "layer tanh", "layer dot_general #2"]


def test_each_result_of_an_equation_has_a_name():
    program, _ = sharded(lambda params, x: jnp.sum(jax.lax.top_k(x @ params["w"], 4)[0]), {"w": (WIDTH, WIDTH)})
    assert {"<lambda> top_k @forward", "<lambda> top_k.1 @forward"} <= set(value_names(program.jaxpr, True).values())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b", "a", "a"], ["a", "b", "a #2", "a #3"]),
        (["a @forward", "a @backward", "a @forward"], ["a @forward", "a @backward", "a #2 @forward"]),
        ([], []),
    ],
)
def test_names_that_were_there_before_are_numbered_before_their_phase(names, expected):
    assert numbered(names) == expected


def roles_of_loops(program: Program) -> dict:
    """What tells loops apart whatever becomes of their bodies: what they reduce, and the loops in them."""
    named = set(program.loop_names.values())
    loops = [loop for loop in find_loops(program) if loop.name in named]
    return {
        loop.name: (reduces_gradients(loop.eqn), [other.name for other in loops if other.is_inside(loop)])
        for loop in loops
    }


@pytest.fixture(scope="module")
def carried_out() -> list[Program]:
    """Layers with loops of their own in microbatches, and what a plan that says all of them makes of that by and by."""
    program, mesh = sharded(inner_loop_loss, STACK, (2 * BATCH, WIDTH), microbatches=2)
    assert len(inner_loops(program)) == 5
    plan = pipelined(Plan("0"), program, choose_schedules(program)).without(MicrobatchLoop)
    plan = plan.having(StackCollectives, [StackCollectives("stack @forward", ("stack/up",))])
    plan = plan.having(SavedGathers, [SavedGathers("stack @forward", "stack @backward", ("stack/down",))])
    turns = find_recomputation(plan.program(program, mesh, until=SavedGathers), CostModel())
    plan = plan.having(KeptActivations, [KeptActivations(*turn.loops, turn.names) for turn in turns])
    plan = plan.having(KeptGathers, keep_gathered(plan.program(program, mesh), float("inf")))
    planned = plan.program(program, mesh)
    sums = {loop.name: list(sum_names(planned, loop)) for loop in find_loops(planned)}
    delayed = [DelayedReductions(name, tuple(names)) for name, names in sums.items() if names]
    plan = plan.having(DelayedReductions, delayed)
    return [program, *(plan.program(program, mesh, until=kind) for kind in TRANSFORMS)]


def test_loops_keep_their_names_after_each_transform(carried_out):
    before, *after = carried_out
    for kind, program in zip(TRANSFORMS, after, strict=True):
        assert roles_of_loops(program) == roles_of_loops(before), kind.kind
    assert len(list(find_loops(after[-1]))) > len(list(find_loops(before))), "iterations run apart"


def test_values_have_the_names_that_checkpoint_name_gives_them():
    def fun(x):
        with jax.named_scope("mlp"):
            up = checkpoint_name(x @ x, "up")
            return checkpoint_name(jnp.sin(up), "two words"), checkpoint_name(jnp.cos(up), "up")

    names = list(value_names(jax.make_jaxpr(fun)(jnp.ones((4, 4)))).values())
    assert names == ["mlp dot_general", "mlp up", "mlp sin", "mlp name", "mlp cos", "mlp up #2"]


@pytest.mark.parametrize("normed", [False, True])
def test_moments_by_hand_are_called_the_same_whatever_arithmetic_tells_of_them(normed):
    def step(s, x):
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(s["params"])
        m = 0.9 * s["m"]["w"] + gradient["w"]
        change = m / jnp.sqrt(jnp.sum(m**2)) if normed else m
        return {"params": {"w": s["params"]["w"] - 0.1 * change}, "m": {"w": m}}, loss

    square = (WIDTH, WIDTH)
    program = trace(step, {"params": {"w": square}, "m": {"w": square}}, square, state_argnums=0).sharded
    assert parameter_names(program) == ["s/m/w", "w", "x"]
