"""Steps that return results and no state: what they read is divided as training left it, and stays where it is."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile
from jax_deepcompile.errors import StateNotReturnedError
from tests.api.steps import arguments_of
from tests.equality.harness import assert_close

pytestmark = pytest.mark.cpu_mesh


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(64)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(16)(x)


class State(TrainState):
    batch_stats: dict


MODEL = Classifier()
BATCH = {
    "x": np.linspace(-1, 1, 32 * 24, dtype=np.float32).reshape(32, 24),
    "y": np.arange(32, dtype=np.int32) % 16,
}


def create(key):
    made = MODEL.init(key, BATCH["x"], train=False)
    return State.create(
        apply_fn=MODEL.apply, params=made["params"], batch_stats=made["batch_stats"], tx=optax.sgd(0.1, momentum=0.9)
    )


def logits_of(state, params, batch, train=False, **more):
    variables = {"params": params, "batch_stats": state.batch_stats}
    return state.apply_fn(variables, batch["x"], train=train, **more)


def loss_of(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def train(state, batch, key):
    def loss(params):
        logits, new = logits_of(state, params, batch, train=True, mutable=["batch_stats"], rngs={"dropout": key})
        return loss_of(logits, batch), new["batch_stats"]

    (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=stats), value


def evaluate(state, batch):
    logits = logits_of(state, state.params, batch)
    return {"loss": loss_of(logits, batch), "right": logits.argmax(-1) == batch["y"], "logits": logits}


def predict(params, x):
    for layer in ("Dense_0", "Dense_1"):
        x = jnp.tanh(x @ params[layer]["kernel"] + params[layer]["bias"])
    return x


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 4}], ids=str)
def test_between_steps_of_training(mesh):
    trained, evaluated = deepcompile.shard(train, mesh), deepcompile.shard(evaluate, mesh)
    state, alone = trained.init(create, jax.random.key(0)), create(jax.random.key(0))
    for seed in range(2):
        state, _ = trained(state, BATCH, jax.random.key(seed))
        alone, _ = jax.jit(train)(alone, BATCH, jax.random.key(seed))
        before = jax.tree.leaves(state)
        assert_close(evaluated(state, BATCH), jax.jit(evaluate)(alone, BATCH), 1e-5, "metrics")
        assert not any(leaf.is_deleted() for leaf in before)
    assert evaluated._fast is not None, "no leaf was moved"
    assert arguments_of(evaluated) == "read only: state; batch: batch"


def test_every_device_works_on_its_own_examples():
    evaluated = deepcompile.shard(evaluate, {"fsdp": 8})
    text = evaluated.trace(create(jax.random.key(0)), BATCH).lower().as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all("tensor<4x" in line for line in products), "of 32 examples 4 each"


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"donate": False}], ids=str)
def test_parameters_alone(options):
    params = create(jax.random.key(1)).params
    predicted = deepcompile.shard(predict, {"fsdp": 8}, **options)
    for given in (params, jax.tree.map(np.asarray, params)):
        assert_close(predicted(given, BATCH["x"]), predict(params, BATCH["x"]), 1e-5, "predictions")
    assert arguments_of(predicted) == "read only: params; batch: x"


@pytest.mark.parametrize(
    ("batch", "step"), [(BATCH["x"], lambda x, params: predict(params, x)), (BATCH, lambda x, p: predict(p, x["x"]))]
)
def test_what_is_said_to_be_the_batch_may_come_first(batch, step):
    params = create(jax.random.key(1)).params
    predicted = deepcompile.shard(step, {"fsdp": 8}, batch_argnums=0)
    assert_close(predicted(batch, params), predict(params, BATCH["x"]), 1e-5, "predictions")
    assert arguments_of(predicted) in ("read only: params; batch: x", "read only: p; batch: x")


def test_the_batch_may_come_before_a_state_that_an_optimizer_is_in():
    evaluated = deepcompile.shard(lambda batch, state: evaluate(state, batch), {"fsdp": 8})
    state = create(jax.random.key(0))
    assert_close(evaluated(BATCH, state), jax.jit(evaluate)(state, BATCH), 1e-5, "metrics")
    assert arguments_of(evaluated) == "read only: state; batch: batch"


def test_moments_that_nothing_reads_stay_in_any_memory():
    state = deepcompile.shard(train, {"fsdp": 8}).init(create, jax.random.key(0))
    host = jax.tree.map(
        lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), state.opt_state
    )
    evaluated = deepcompile.shard(evaluate, {"fsdp": 8})
    expected = evaluated(state, BATCH)
    assert_close(evaluated(state.replace(opt_state=host), BATCH), expected, 0, "metrics")
    assert evaluated._fast is not None
    first = deepcompile.shard(evaluate, {"fsdp": 8})
    assert_close(first(state.replace(opt_state=host), BATCH), expected, 0, "metrics")
    assert first._fast is not None


def test_objects_that_nothing_changes_keep_their_arrays():
    model = nnx.Sequential(nnx.Linear(24, 64, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(1)))
    expected = model(BATCH["x"])
    predicted = deepcompile.shard(lambda model, x: (model(x), model), {"fsdp": 8})
    found, same = predicted(model, BATCH["x"])
    assert same is model
    assert_close(found, expected, 1e-5, "predictions")
    kernel = model.layers[0].kernel.get_value()
    assert kernel.addressable_shards[0].data.shape == (3, 64), "from the first call on they are divided"
    assert_close(predicted(model, BATCH["x"])[0], expected, 1e-5, "predictions")
    assert model.layers[0].kernel.get_value() is kernel
    assert arguments_of(predicted) == "read only: model; batch: x"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_state_that_every_call_has_to_move_is_told(is_there, caplog, monkeypatch):
    monkeypatch.setattr("jax_deepcompile.frontend.arguments._MOVED_BYTES", 1)
    evaluated = deepcompile.shard(evaluate, {"fsdp": 8})
    state = evaluated.init(create, jax.random.key(0)) if is_there else create(jax.random.key(0))
    for _ in range(2):
        evaluated(state, BATCH)
    told = [each.message for each in caplog.records if "in every call" in each.message]
    assert told == [] if is_there else [told[0]]
    assert is_there or told[0].startswith("evaluate moves 11.3 KiB of its state to the devices in every call")


@pytest.mark.h100_aot
def test_moments_that_nothing_reads_take_no_memory_of_the_device_where_they_are_on_the_host():
    mesh = deepcompile.targets.h100().make_mesh((8,), ("fsdp",))
    evaluated = deepcompile.shard(evaluate, mesh, passes=(), memory_limit="8GiB")
    on_host = NamedSharding(mesh.abstract_mesh, PartitionSpec("fsdp"), memory_kind="pinned_host")

    def peak_bytes(sharding):
        moments = jax.ShapeDtypeStruct((1 << 20, 64), jnp.float32, sharding=sharding)
        state = jax.eval_shape(create, jax.random.key(0)).replace(opt_state={"m": moments})
        return evaluated.reshard().plan(state, BATCH).prediction.peak_bytes

    assert peak_bytes(None) - peak_bytes(on_host) == pytest.approx(2**20 * 64 * 4 / 8, rel=0.01)


def test_moments_that_nothing_reads_have_memory():
    state = create(jax.random.key(0))
    compiled = deepcompile.shard(evaluate, {"fsdp": 8}).trace(state, BATCH).lower().compile()
    without = deepcompile.shard(evaluate, {"fsdp": 8}).trace(state.replace(opt_state=()), BATCH).lower().compile()
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state)) / 8
    read, unread = (each.memory_analysis().argument_size_in_bytes for each in (without, compiled))
    assert unread - read == pytest.approx(moments, rel=0.2)
    with pytest.raises(deepcompile.errors.MemoryExceededError, match=r"reads nothing of .* of its state: call it with"):
        deepcompile.shard(evaluate, {"fsdp": 8}, memory_limit=1 << 10).plan(state, BATCH)
    with pytest.raises(deepcompile.errors.MemoryExceededError, match=r"what temporaries take besides\.$"):
        deepcompile.shard(evaluate, {"fsdp": 8}, memory_limit=1 << 10).plan(state.replace(opt_state=()), BATCH)


def without_its_state(state, batch, key):
    return train(state, batch, key)[1]


def without_its_state_jitted(state, batch, key):
    return jax.jit(train)(state, batch, key)[1]


def by_its_leaves(state, batch, key):
    return jax.tree.leaves(train(state, batch, key)[0])


def without_its_optimizer(state, batch, key):
    new, loss = train(state, batch, key)
    return new.params, loss


def with_a_norm_of_the_new(state, batch, key):
    new, loss = train(state, batch, key)
    return {"loss": loss, "norm": optax.tree.norm(new.params)}


def of_the_last_layer(state, batch, key):
    def loss_of_last(last):
        return loss_of(predict({**state.params, "Dense_1": last}, batch["x"]), batch)

    loss, gradients = jax.value_and_grad(loss_of_last)(state.params["Dense_1"])
    jax.tree.map(lambda old, gradient: old - 0.1 * gradient, state.params["Dense_1"], gradients)
    return loss


def of_the_batch_alone(state, batch, key):
    return batch["x"].mean()


@pytest.mark.parametrize(
    "step",
    [
        without_its_state,
        without_its_state_jitted,
        by_its_leaves,
        without_its_optimizer,
        with_a_norm_of_the_new,
        of_the_last_layer,
        of_the_batch_alone,
    ],
)
def test_a_state_that_is_forgotten_is_missed(step):
    with pytest.raises(StateNotReturnedError, match="does not return its state"):
        deepcompile.shard(step).trace(create(jax.random.key(0)), BATCH, jax.random.key(0))


def test_a_weight_that_is_forgotten_is_missed():
    def descent(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return loss, jnp.sum(w - 0.1 * gradient)

    with pytest.raises(StateNotReturnedError, match="argument w"):
        deepcompile.shard(descent).trace(np.ones((24, 8), np.float32), BATCH["x"])


def with_statistics_in_vain(state, batch):
    logits, new = logits_of(
        state, state.params, batch, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(0)}
    )
    decayed = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(state.params))
    del new, decayed
    return loss_of(logits, batch)


def with_gradients_in_vain(state, batch):
    return jax.value_and_grad(lambda params: loss_of(logits_of(state, params, batch), batch))(state.params)[0]


def with_an_average_in_vain(state, batch):
    averaged = jax.tree.map(lambda old, other: 0.9 * old + 0.1 * other, state.params, state.opt_state[0].trace)
    scaled = jax.tree.map(lambda leaf: leaf / (jnp.linalg.norm(leaf) + 1), state.params)
    del averaged
    return loss_of(predict(scaled, batch["x"]), batch)


def of_nodes(state, batch):
    """An activation carries a parameter on, and depends on it through a product too."""
    nodes = state.opt_state[0].trace["Dense_0"]["kernel"]
    nodes = nodes + jnp.tanh(nodes @ nodes.T) @ nodes
    return jnp.mean(batch["x"] @ nodes @ state.params["Dense_1"]["kernel"])


@pytest.mark.parametrize("step", [with_statistics_in_vain, with_gradients_in_vain, with_an_average_in_vain, of_nodes])
def test_what_else_comes_to_nothing_is_no_state(step):
    state = create(jax.random.key(0))
    evaluated = deepcompile.shard(step, {"fsdp": 8})
    assert_close(evaluated(state, BATCH), jax.jit(step)(state, BATCH), 1e-5, "loss")


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(24, 24, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x)), jnp.mean(x**2)


@nnx.split_rngs(splits=2)
@nnx.vmap(in_axes=(0,), out_axes=0)
def layers(rngs):
    return Layer(rngs)


def test_loops_of_flax_hand_parameters_on():
    graph, params = nnx.split(layers(nnx.Rngs(0)))

    def sizes(params, x):
        layer = nnx.remat(lambda x, layer: layer(x))
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(x, nnx.merge(graph, params))

    found = deepcompile.shard(sizes, {"fsdp": 8})(params, BATCH["x"])
    assert_close(found, jax.jit(sizes)(params, BATCH["x"]), 1e-5, "sizes")


def test_gradients_are_divided_like_what_they_are_of():
    state = create(jax.random.key(0))
    gradients = jax.grad(lambda params, state, batch: evaluate(state.replace(params=params), batch)["loss"])
    found = deepcompile.shard(lambda state, batch: {"of": gradients(state.params, state, batch)}, {"fsdp": 8})(
        state, BATCH
    )
    assert_close(found["of"], gradients(state.params, state, BATCH), 1e-5, "gradients")
    assert not found["of"]["Dense_0"]["kernel"].sharding.is_fully_replicated


def test_state_on_the_devices_in_another_order_is_moved():
    state = deepcompile.shard(train, {"fsdp": 8}).init(create, jax.random.key(0))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("fsdp",))
    other = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec())), state)
    evaluated = deepcompile.shard(evaluate, {"fsdp": 8})
    assert_close(evaluated(other, BATCH), evaluated(state, BATCH), 1e-6, "metrics")


def test_what_is_said_to_be_state_has_to_be_returned():
    with pytest.raises(StateNotReturnedError, match="argument state"):
        deepcompile.shard(evaluate, state_argnums=0).trace(create(jax.random.key(0)), BATCH)
