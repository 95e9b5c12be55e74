"""Steps that are methods, and steps that train NNX objects."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_deepcompile as deepcompile
from tests.api.steps import assert_equal, batch, create, step

pytestmark = pytest.mark.cpu_mesh


@pytest.fixture(scope="module")
def expected():
    return jax.jit(step)(create(), batch())


def test_nnx_objects_with_dropout_batch_norm_and_metrics():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(16, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.dense(x)))

    def train(optimizer, metrics, x):
        def loss_of(model):
            return jnp.mean((model(x) - x[:, :8]) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(optimizer.model)
        optimizer.update(grads)
        metrics.update(loss=loss)
        return loss

    def build():
        optimizer = nnx.ModelAndOptimizer(Model(nnx.Rngs(0)), optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)
        return optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    sharded, plain = deepcompile.shard(train), nnx.jit(train)
    mine, theirs = build(), build()
    x = np.random.default_rng(0).standard_normal((32, 16), np.float32)
    for _ in range(3):
        np.testing.assert_allclose(sharded(*mine, x), plain(*theirs, x), rtol=1e-5)
    np.testing.assert_allclose(mine[1].compute()["loss"], theirs[1].compute()["loss"], rtol=1e-4)
    assert not mine[0].model.dense.kernel[...].sharding.is_fully_replicated
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *map(_values, (mine, theirs)))


def test_a_method_of_an_nnx_module_trains_its_object():
    class Trainer(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(16, 8, rngs=nnx.Rngs(0))

        def descend(self, batch):
            def loss_of(trainer):
                return jnp.mean(trainer.dense(batch["x"]) ** 2)

            loss, grads = nnx.value_and_grad(loss_of)(self)
            nnx.update(self, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(self), nnx.state(grads)))
            return loss

        sharded = deepcompile.shard(descend)

    mine, theirs = Trainer(), Trainer()
    for _ in range(2):
        assert_equal(mine.sharded(batch()), nnx.jit(Trainer.descend)(theirs, batch()))
    assert_equal(nnx.state(mine), nnx.state(theirs))
    assert not mine.dense.kernel[...].sharding.is_fully_replicated
    assert "self[0]['dense']['kernel'].value" in [port.path for port in mine.sharded.trace(batch()).program.inputs]


def test_a_method_of_a_pytree_counts_its_object_as_the_first_argument(expected):
    class Scale(flax.struct.PyTreeNode):
        by: float

        @functools.partial(deepcompile.shard, state_argnums=1, batch_argnums=2)
        def step(self, state, batch):
            return step(state, {"x": batch["x"] * self.by})

    scale = Scale(1.0)
    assert_equal(scale.step(create(), batch()), expected)
    assert_equal(Scale.step(scale, create(), batch()), expected)
    assert "reduce-scatter" in scale.step.lower(create(), batch()).compile().as_text()
    assert "2 leaves" in scale.step.explain()
    assert_equal(scale.step.reshard({"fsdp": 4})(create(), batch()), expected)


def test_the_bound_method_of_a_plain_object(expected):
    class Trainer:
        def __init__(self) -> None:
            self.step = deepcompile.shard(self.step)

        def step(self, state, batch):
            return step(state, batch)

    assert_equal(Trainer().step(create(), batch()), expected)


def _values(objects):
    leaves = jax.tree.leaves(nnx.state(objects))
    return [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
