"""What every model's step moves: each parameter gathered where it is used, each gradient reduce-scattered once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from jax_deepcompile.partition.layout import Fetch, Layout
from jax_deepcompile.partition.reshard import MoveKind, plan_moves
from models import gpt2, llama, mixtral, resnet, vit

pytestmark = pytest.mark.pure

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
MESHES = {"8": {"fsdp": 8}, "2x4": {"data": 2, "fsdp": 4}}
TOKENS = jax.ShapeDtypeStruct((16, 17), jnp.int32)


class Example(NamedTuple):
    """A step and the shapes of its arguments."""

    step: Callable
    args: tuple


def linen_language_model(model, loss: Callable, length: int = 16, **kwargs) -> Example:
    def create():
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)

    def step(state, tokens):
        def loss_of(params):
            return loss(state.apply_fn({"params": params}, tokens[:, :-1], **kwargs), tokens[:, 1:])

        value, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), value

    return Example(step, (jax.eval_shape(create), jax.ShapeDtypeStruct((16, length + 1), jnp.int32)))


def nnx_model(build: Callable, loss_of: Callable, batch: Any) -> Example:
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    model = nnx.eval_shape(build)
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(build(), OPTIMIZER, wrt=nnx.Param))
    return Example(step, (model, optimizer, batch))


def resnet_example() -> Example:
    model = resnet.ResNet(resnet.RESNET_TINY)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3))))
    opt_state = jax.eval_shape(OPTIMIZER.init, variables["params"])
    state = {"params": variables["params"], "stats": variables["batch_stats"], "opt_state": opt_state}

    def step(state, batch):
        def loss_of(params):
            variables = {"params": params, "batch_stats": state["stats"]}
            logits, changed = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
            return resnet.classification_loss(logits, batch["label"]), changed["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "opt_state": opt_state}, loss

    return Example(step, (state, image_batch(32)))


def image_batch(pixels: int) -> dict[str, jax.ShapeDtypeStruct]:
    image = jax.ShapeDtypeStruct((16, pixels, pixels, 3), jnp.float32)
    return {"image": image, "label": jax.ShapeDtypeStruct((16,), jnp.int32)}


EXAMPLES: dict[str, Callable[[], Example]] = {
    "llama": lambda: linen_language_model(llama.Llama(llama.LLAMA_TINY), llama.next_token_loss),
    "gpt2": lambda: linen_language_model(
        gpt2.GPT2(gpt2.GPT2_TINY), gpt2.next_token_loss, 64, train=True, rngs={"dropout": jax.random.key(1)}
    ),
    "resnet": resnet_example,
    "vit": lambda: nnx_model(
        lambda: vit.ViT(vit.VIT_TINY, rngs=nnx.Rngs(0)),
        lambda model, batch: vit.classification_loss(model(batch["image"], train=True), batch["label"]),
        image_batch(16),
    ),
    "mixtral": lambda: nnx_model(
        lambda: mixtral.Mixtral(mixtral.MIXTRAL_TINY, rngs=nnx.Rngs(0)),
        lambda model, batch: mixtral.next_token_loss(model(batch[:, :-1])[0], batch[:, 1:]),
        TOKENS,
    ),
}


def fetches(layout: Layout):
    """``(atom, fetch, trips)`` for everything that is fetched."""
    for inner, trips in layout.nested_layouts():
        for step in inner.steps:
            yield from ((atom, fetch, trips) for atom, fetch in zip(step.eqn.invars, step.fetches, strict=True))
        yield from ((atom, fetch, trips) for atom, fetch in zip(inner.jaxpr.outvars, inner.outputs, strict=True))


def kept(layout: Layout):
    """``(var, fetch, trips)`` for every result, from how it is computed to how it is kept."""
    for step, trips in layout.walk():
        for var, computed, placement in zip(step.eqn.outvars, step.results, step.kept, strict=True):
            yield var, Fetch(computed, placement), trips


def moves(layout: Layout):
    """``(atom, fetch, move, trips)`` for everything that is communicated."""
    for atom, fetch, trips in (*fetches(layout), *kept(layout)):
        for move in plan_moves(fetch.source, fetch.target, layout.mesh):
            if move.kind.communicates:
                yield atom, fetch, move, trips


@pytest.fixture(scope="module", params=[(name, mesh) for name in EXAMPLES for mesh in MESHES], ids="-".join)
def traced(request):
    name, mesh = request.param
    example = EXAMPLES[name]()
    return name, deepcompile.shard(example.step, MESHES[mesh]).trace(*example.args)


def trained_elements(traced, without: str = "nothing") -> int:
    """Elements of the parameters and statistics that are divided; each parameter has a first moment of its shape."""
    divided = [leaf.path for leaf in traced.partitioned.leaves if not leaf.placement.is_replicated]
    paths = [path for path in divided if without not in path]
    ports = {port.path: port for port in traced.program.inputs}
    return sum(math.prod(ports[path].shape) for path in paths if "mu" in path or "stats" in path)


def test_every_gradient_is_reduce_scattered_once(traced):
    """ResNet's statistics are scattered too, where their running averages are.

    The gradient of a table that is only looked up in is not: each device gets the gradients of the rows it has.
    """
    name, step = traced
    tables = "embed" if name in ("llama", "mixtral") else "nothing"
    scattered = sum(
        math.prod(atom.aval.shape) * trips
        for atom, _, move, trips in moves(step.partitioned.layout)
        if move.kind is MoveKind.REDUCE_SCATTER
    )
    assert scattered == pytest.approx(trained_elements(step, without=tables), rel=0.03 if name != "resnet" else 0.15)


def test_every_parameter_is_gathered_at_most_twice(traced):
    """Once for the forward and once for the backward pass."""
    _, step = traced
    gathered = sum(
        math.prod(atom.aval.shape) * trips
        for atom, fetch, move, trips in moves(step.partitioned.layout)
        if move.kind is MoveKind.ALL_GATHER and not fetch.batch
    )
    assert 0 < gathered <= 2.02 * trained_elements(step)


def test_no_large_activation_is_gathered_or_exchanged(traced):
    """Statistics of a BatchNorm may be: they have the size of a parameter's vector, not of the batch.

    What is looked up in a table is moved instead of the table: tokens, and the gradients of their embeddings.
    """
    _, step = traced
    looked_up = {
        id(atom)
        for each, _ in step.partitioned.layout.walk()
        if each.eqn.primitive.name in ("gather", "scatter-add")
        for atom in each.eqn.invars
    }
    for atom, fetch, _ in fetches(step.partitioned.layout):
        if fetch.moves_activation and id(atom) not in looked_up:
            assert math.prod(atom.aval.shape) <= 512, (atom.aval, fetch)


def test_no_divided_gradient_is_all_reduced_whole(traced):
    """Over ``fsdp`` only scalars, statistics and what could not be divided are; over ``data`` only shards are."""
    _, step = traced
    largest_vector = 512
    mesh = step.partitioned.layout.mesh
    for atom, fetch, move, _ in moves(step.partitioned.layout):
        if move.kind is not MoveKind.ALL_REDUCE or math.prod(atom.aval.shape) <= largest_vector:
            continue
        assert move.axes == ("data",), (atom.aval, move)
        assert fetch.target.axes[mesh.names.index("fsdp")] >= 0, (atom.aval, fetch)


def test_nothing_is_computed_whole_for_want_of_a_rule(traced):
    _, step = traced
    assert "computed whole on every device: nothing that could be split" in step.explain()


def test_counts_for_llama():
    """Two layers of nine leaves, gathered forward and backward; embedding and head once; the last norm twice.

    Tokens and the gradients of their embeddings are gathered, where the table's gradient would be scattered: as large.
    """
    example = EXAMPLES["llama"]()
    step = deepcompile.shard(example.step, {"fsdp": 8}).trace(*example.args)
    count: Counter = Counter()
    for _, _, move, trips in moves(step.partitioned.layout):
        count[move.kind] += trips
    assert count[MoveKind.ALL_GATHER] == 2 * 2 * 9 + 4 + 2
    assert count[MoveKind.REDUCE_SCATTER] == 2 * 9 + 2
    assert set(count) == {MoveKind.ALL_GATHER, MoveKind.REDUCE_SCATTER, MoveKind.ALL_REDUCE}
