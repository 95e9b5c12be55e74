"""What a step was jitted with holds of the sharded step too: arguments that are static, and what is donated."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jax_deepcompile as deepcompile
from jax_deepcompile import errors
from tests.api.steps import assert_equal, batch, create, step

pytestmark = pytest.mark.cpu_mesh


@dataclass(frozen=True)
class Config:
    rate: float = 0.1


def configured(state, batch, config, scale, train=False):
    after, loss = step(state, batch)
    w = state["w"] + config.rate * scale * (2 if train else 1) * (after["w"] - state["w"])
    return {**after, "w": w}, loss


@pytest.mark.parametrize("how", [{"static_argnums": (2, 4)}, {"static_argnames": ("config", "train")}])
def test_static_arguments_are_values(how):
    jitted = jax.jit(configured, **how)
    sharded = deepcompile.shard(jitted)
    for args, kwargs in [
        ((Config(), 1.0), {}),
        ((Config(0.5), 1.0), {}),
        ((Config(), 2.0), {"train": True}),
        ((), {"scale": 2.0, "config": Config(0.5)}),
    ]:
        expected = jitted(create(), batch(), *args, **kwargs)
        assert_equal(sharded(create(), batch(), *args, **kwargs), expected)
    state, expected = create(), create()
    for _ in range(3):
        state, _ = sharded(state, batch(), Config(), 1.0)
        expected, _ = jitted(expected, batch(), Config(), 1.0)
        assert_equal(state, expected)
    assert "config: static: as jax.jit was told" in str(sharded.explain())
    assert sharded.lower(state, batch(), Config(), 1.0) is not None


def test_equal_values_of_different_types_are_different_values():
    scaled = jax.jit(
        lambda state, batch, by: (state, jnp.ones(()) * (3 if isinstance(by, bool) else by)), static_argnums=2
    )
    sharded = deepcompile.shard(scaled)
    assert [sharded(create(), batch(), by)[1] for by in (True, 1, 1.0)] == [3, 1, 1]


def test_arrays_of_a_call_are_not_kept():
    sharded, state = deepcompile.shard(jax.jit(configured, static_argnums=2), donate=False), create()
    kept = weakref.ref(state["w"])
    sharded(state, batch(), Config(), 1.0)
    del state
    gc.collect()
    assert kept() is None


def test_a_method_whose_object_is_static():
    class Trainer:
        rate = 0.5

        @deepcompile.shard
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, state, batch):
            return configured(state, batch, self, 1.0)

    assert_equal(Trainer().step(create(), batch()), configured(create(), batch(), Config(0.5), 1.0))


def test_what_is_bound_already_does_not_count():
    class Trainer:
        rate = 0.5

        @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnames="state")
        def step(self, state, batch, train):
            return configured(state, batch, self, 1.0, train)

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((16, 16)))

        @functools.partial(nnx.jit, static_argnames="train")
        def step(self, x, train):
            loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((x @ model.w[...]) ** 2))(self)
            self.w[...] -= 0.1 * gradients.w[...]
            return loss * (2 if train else 1)

        def plain_step(self, x):
            return type(self).step(self, x, False)

    trainer, expected = Trainer(), configured(create(), batch(), Config(0.5), 1.0, True)
    assert_equal(deepcompile.shard(trainer.step)(create(), batch(), True), expected)
    assert_equal(deepcompile.shard(functools.partial(Trainer.step, trainer))(create(), batch(), True), expected)
    ours, theirs, x = Model(), Model(), jnp.ones((16, 16))
    sharded, plain = deepcompile.shard(ours.step), deepcompile.shard(ours.plain_step, batch_argnums=0)
    for _ in range(2):
        assert_equal(sharded(x, train=True), theirs.step(x, train=True))
        assert_equal(plain(x), theirs.step(x, train=False))
    assert_equal(nnx.state(ours), nnx.state(theirs))


def test_static_arguments_beside_nnx_objects():
    def loss(model, x, train):
        return jnp.mean(model(x) ** 2) * (2 if train else 1)

    def train_step(model, optimizer, x, train):
        value, gradients = nnx.value_and_grad(loss)(model, x, train)
        optimizer.update(model, gradients)
        return value

    def objects():
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    jitted = nnx.jit(train_step, static_argnames="train")
    sharded, x = deepcompile.shard(jitted), jnp.ones((16, 16))
    ours, theirs = objects(), objects()
    for train in (True, False, True):
        assert_equal(sharded(*ours, x, train=train), jitted(*theirs, x, train=train))


def test_a_static_argument_without_a_hash():
    with pytest.raises(errors.StaticArgumentError, match=r"config is \{'rate': 0.1\}, which has no hash"):
        deepcompile.shard(jax.jit(configured, static_argnums=2)).trace(create(), batch(), {"rate": 0.1}, 1.0)


def test_what_is_donated():
    """Of one array gradients cannot be told from the next state, unless somebody says so."""

    def alone(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - gradient, loss

    for how, donated in [({}, False), ({"donate_argnums": 0}, True), ({"donate_argnames": "w"}, True)]:
        sharded, x = deepcompile.shard(jax.jit(alone, **how)), jnp.ones((16, 16))
        w, _ = sharded(jnp.ones((16, 8)), x)
        sharded(w, x)
        assert w.is_deleted() == donated, how
        assert ("jax.jit was told to donate it" in str(sharded.explain())) == donated
