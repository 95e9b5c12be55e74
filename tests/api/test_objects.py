"""Steps that are methods, and steps that train NNX objects."""

from __future__ import annotations

import dataclasses
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


def test_leaves_of_objects_that_are_no_numbers_stay_as_they_are():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, kind) -> None:
            self.dense = nnx.Linear(16, 8, rngs=rngs)
            self.kind = nnx.Variable({"type": kind, "name": "half", "scale": jnp.ones(())})

    def train(model, optimizer, x):
        def loss_of(model):
            return jnp.mean(model.dense(x.astype(model.kind["type"])) ** 2) * model.kind["scale"]

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    def build(kind):
        model = Model(nnx.Rngs(0), kind)
        return model, nnx.Optimizer(model, optax.MultiSteps(optax.sgd(1e-2), 2), wrt=nnx.Param)

    sharded, x = deepcompile.shard(train), np.ones((16, 16), np.float32)
    model, optimizer = sharded.init(functools.partial(build, jnp.dtype(jnp.float16)))
    losses = [sharded(model, optimizer, x) for _ in range(4)]
    assert model.kind["type"] == jnp.float16
    assert model.kind["name"] == "half"
    assert losses[0] == losses[1] > losses[2]
    assert sharded(*build(jnp.dtype(jnp.float32)), x).dtype == jnp.float32


def test_objects_cached_by_flax_are_trained():
    """``nnx.cached_partial`` is how Flax spares a loop the walk through its objects."""

    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x[:, :8]) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def build():
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    mine, theirs = build(), build()
    sharded, plain = deepcompile.shard(train), nnx.jit(train)
    cached = nnx.cached_partial(sharded, *mine)
    x = np.random.default_rng(0).standard_normal((32, 16), np.float32)
    for _ in range(3):
        np.testing.assert_allclose(cached(x), plain(*theirs, x), rtol=1e-5)
    np.testing.assert_allclose(mine[0].kernel[...], theirs[0].kernel[...], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sharded(*mine, x), plain(*theirs, x), rtol=1e-5)


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
    assert "self['dense']['kernel'].value" in [port.path for port in mine.sharded.trace(batch()).program.inputs]


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


class Regression(nnx.Module):
    def __init__(self, config=None) -> None:
        self.config = config
        self.dense = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(x)


def descent(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def after_two_steps(step, call, config=None):
    model = Regression(config)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    x = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    losses = [call(step, model, optimizer, x) for _ in range(2)]
    assert optimizer.step[...] == 2
    return losses, nnx.to_pure_dict(nnx.state((model, optimizer)))


def optimizer_by_name_only(model, x, *, optimizer):
    return descent(model, optimizer, x)


def all_by_name_only(*, x, optimizer, model):
    return descent(model, optimizer, x)


@flax.struct.dataclass
class Holder:
    model: nnx.Module
    optimizer: nnx.Optimizer
    scale: float = 1.0


def held(holder, x):
    return holder.scale * descent(holder.model, holder.optimizer, x)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (descent, lambda step, model, optimizer, x: step(model=model, optimizer=optimizer, x=x)),
        (descent, lambda step, model, optimizer, x: step(model, x=x, optimizer=optimizer)),
        (optimizer_by_name_only, lambda step, model, optimizer, x: step(model, x, optimizer=optimizer)),
        (all_by_name_only, lambda step, model, optimizer, x: step(model=model, optimizer=optimizer, x=x)),
        (held, lambda step, model, optimizer, x: step(Holder(model, optimizer, 2.0), x)),
    ],
)
def test_objects_are_updated_however_they_are_passed(function, call):
    sharded, plain = deepcompile.shard(function), nnx.jit(function)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        after_two_steps(sharded, call),
        after_two_steps(plain, call),
    )
    assert "batch" in {str(port.role) for port in sharded._last.program.inputs}


def test_two_holders_of_the_same_shape_are_told_apart():
    def first_or_second(pair, optimizer, x):
        return descent(pair["first"] or pair["second"], optimizer, x) * (1 if pair["first"] else 3)

    step = deepcompile.shard(first_or_second)
    first, _ = after_two_steps(step, lambda step, *rest: step({"first": rest[0], "second": None}, *rest[1:]))
    second, _ = after_two_steps(step, lambda step, *rest: step({"first": None, "second": rest[0]}, *rest[1:]))
    np.testing.assert_allclose(second, 3 * np.array(first), rtol=1e-5)


def test_objects_in_a_container_beside_another_are_called_as_the_user_finds_them():
    def averaging(models, optimizer, x):
        loss = descent(models["now"], optimizer, x)
        mean, now = (nnx.state(models[name]) for name in ("mean", "now"))
        nnx.update(models["mean"], jax.tree.map(lambda old, new: (old + new) / 2, mean, now))
        return loss

    def in_container(step, model, optimizer, x):
        return step({"mean": nnx.clone(model), "now": model}, optimizer, x)

    step = deepcompile.shard(averaging)
    losses, _ = after_two_steps(step, in_container)
    np.testing.assert_allclose(losses, after_two_steps(nnx.jit(averaging), in_container)[0], rtol=1e-5)
    paths = {port.path for port in step._last.program.inputs}
    assert {"models['mean']['dense']['kernel'].value", "models['now']['dense']['kernel'].value"} <= paths
    assert "optimizer['opt_state'][0]['trace']['dense']['kernel'].value" in paths
    assert "models: state, donated: NNX objects" in str(step.explain())

    def growing(models, optimizer, x):
        loss = averaging(models, optimizer, x)
        models["now"].more = nnx.Param(jnp.ones(3))
        return loss

    with pytest.raises(deepcompile.errors.StateChangedError, match=r": models\['now'\]\['more'\].value is new"):
        after_two_steps(deepcompile.shard(growing), in_container)


def test_attributes_of_modules_need_not_be_hashable():
    @dataclasses.dataclass
    class Config:
        widths: list

    def call(step, model, optimizer, x):
        return step(model, optimizer, x)

    step = deepcompile.shard(descent)
    losses, _ = after_two_steps(step, call, Config([16]))
    np.testing.assert_allclose(losses, after_two_steps(nnx.jit(descent), call)[0], rtol=1e-5)
    assert len(step._compilations) == 1


def test_an_argument_without_arrays_is_neither_state_nor_batch():
    graph, params = nnx.split(Regression())

    def functional(graph, params, x):
        loss, gradients = jax.value_and_grad(lambda params: jnp.mean((nnx.merge(graph, params)(x) - x) ** 2))(params)
        return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients), loss

    x = np.ones((16, 16), np.float32)
    mine, theirs = deepcompile.shard(functional, donate=False)(graph, params, x), jax.jit(functional)(graph, params, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), mine, theirs)
    assert not jax.tree.leaves(mine[0])[0].sharding.is_fully_replicated


def test_positions_count_parameters_also_where_names_are_used():
    def with_key(state, key=None, batch=None):
        loss, gradients = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
        return state - 0.1 * gradients, loss

    x = np.ones((16, 16), np.float32)
    step = deepcompile.shard(with_key, batch_argnums=2, donate=False)
    new, _ = step(jnp.eye(16), batch=x)
    np.testing.assert_allclose(new, jax.jit(with_key)(jnp.eye(16), batch=x)[0], rtol=1e-5)
    assert "batch" in {str(port.role) for port in step._last.program.inputs}


def test_objects_that_are_returned_are_the_users_own():
    """Not copies: their parameters need not be gathered to be returned."""

    def returning(holder, x):
        loss = held(holder, x)
        fresh = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        return holder.replace(scale=2.0 * holder.scale), {"bias": holder.model.dense.bias, "fresh": fresh}, loss

    model = Regression()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    x = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    step = deepcompile.shard(returning)
    holder, others, _ = step(Holder(model, optimizer), x)
    assert (holder.model is model, holder.optimizer is optimizer, float(holder.scale)) == (True, True, 2.0)
    assert others["bias"] is model.dense.bias
    assert others["fresh"].kernel.shape == (2, 2)
    assert not model.dense.kernel[...].sharding.is_fully_replicated
    silent = deepcompile.shard(held)
    silent(Holder(model, optimizer), x)
    counted = [line for step in (step, silent) for line in str(step.explain()).splitlines() if "all_gather" in line]
    assert counted[0] == counted[1]


def test_random_streams_as_an_argument_go_on():
    """As in flax's own MNIST example; ``nnx.Rngs`` answers every attribute name with a stream."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(16, 16, rngs=rngs)
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
            return self.dropout(self.dense(x), rngs=rngs)

    def train_step(model, optimizer, rngs, batch):
        loss, grads = nnx.value_and_grad(lambda model, rngs: jnp.mean(model(batch, rngs) ** 2))(model, rngs)
        optimizer.update(model, grads)
        return loss

    def losses(step) -> list[float]:
        model, rngs = Model(nnx.Rngs(0)), nnx.Rngs(3)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        return [float(step(model, optimizer, rngs, jnp.ones((16, 16)))) for _ in range(3)]

    ours = losses(deepcompile.shard(train_step, {"fsdp": 8}))
    np.testing.assert_allclose(ours, losses(nnx.jit(train_step)), rtol=1e-5)
    assert len(set(ours)) == 3
