"""A step in microbatches computes what it computes with the whole batch at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jax_deepcompile as deepcompile
from models import llama, mixtral, vit
from tests.equality.harness import MESHES, TWO_MESHES, assert_close, assert_same_training

pytestmark = pytest.mark.cpu_mesh

ONES = {"1": {"fsdp": 1}, "1x8": {"data": 1, "fsdp": 8}, "8x1": {"data": 8, "fsdp": 1}}
"""With axes of one device."""
DESCENT = optax.sgd(0.1, momentum=0.9)
"""Adds no noise of its own: an adaptive optimizer divides by second moments, which doubles what is lost to rounding."""


def examples(seed: int, size: int = 32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((size, 16), np.float32),
        "y": random.integers(0, 8, size, np.int32),
        "mask": (random.random(size) < np.linspace(0.1, 0.9, size)).astype(np.float32),
    }


def create_classifier(key, optimizer: optax.GradientTransformation = DESCENT) -> dict[str, Any]:
    up, down = jax.random.split(key)
    params = {
        "up": 0.3 * jax.random.normal(up, (16, 32)),
        "bias": jnp.zeros(32),
        "odd": jnp.ones(3),
        "down": 0.3 * jax.random.normal(down, (32, 8)),
    }
    return {"params": params, "opt_state": optimizer.init(params), "key": key, "step": jnp.zeros((), jnp.int32)}


def logits_of(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"]) * params["odd"].prod()
    return hidden @ params["down"]


def example_losses(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch["x"]), batch["y"])


def training(loss_of: Callable, optimizer: optax.GradientTransformation = DESCENT) -> Callable:
    """The step for ``loss_of(params, batch, key) -> (loss, metrics)``."""

    def step(state, batch):
        key = jax.random.fold_in(state["key"], state["step"])
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"], batch, key)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        changed = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return state | changed, {"loss": loss, "grad_norm": optax.tree.norm(grads), **metrics}

    return step


def assert_same_in_microbatches(loss_of: Callable, optimizer=DESCENT, microbatches: int = 4, **kwargs) -> None:
    def create(key):
        return create_classifier(key, optimizer)

    step, batches = training(loss_of, optimizer), [examples(seed) for seed in range(3)]
    assert_same_training(step, create, batches, microbatches=microbatches, **kwargs)


def mean(params, batch, key):
    return example_losses(params, batch).mean(), {}


@pytest.mark.parametrize("microbatches", [2, 4])
def test_mean(microbatches: int):
    assert_same_in_microbatches(mean, microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_axes_of_one_device(microbatches: int):
    def create(key):
        state = create_classifier(key)
        params = state["params"] | {"shift": jnp.ones((1, 16))}
        return state | {"params": params, "opt_state": DESCENT.init(params)}

    def loss_of(params, batch, key):
        return mean(params, batch | {"x": batch["x"] + params["shift"]}, key)

    batches = [examples(seed) for seed in range(2)]
    assert_same_training(training(loss_of), create, batches, ONES, microbatches=microbatches)


def test_mean_over_masked_examples():
    """The number of examples that count differs between microbatches, so means of means would be wrong."""

    def loss_of(params, batch, key):
        losses = example_losses(params, batch) * batch["mask"]
        return losses.sum() / batch["mask"].sum(), {"examples": batch["mask"].sum()}

    assert_same_in_microbatches(loss_of)


def test_sum_that_is_normalised_after_differentiation():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), DESCENT)

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: (example_losses(p, batch) * batch["mask"]).sum())(state["params"])
        grads = jax.tree.map(lambda grad: grad / batch["mask"].sum(), grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        return state | {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    batches = [examples(seed) for seed in range(2)]
    assert_same_training(step, lambda key: create_classifier(key, optimizer), batches, microbatches=4)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(0.1), DESCENT),
        optax.chain(optax.add_decayed_weights(0.01), DESCENT),
        optax.MultiSteps(DESCENT, every_k_schedule=2).gradient_transformation(),
        optax.chain(optax.adaptive_grad_clip(0.01), DESCENT),
    ],
    ids=["global norm", "weight decay", "every second step", "adaptive clipping"],
)
def test_optimizers_see_the_whole_gradient_once(optimizer):
    assert_same_in_microbatches(mean, optimizer)


def test_weight_decay_in_the_loss():
    def loss_of(params, batch, key):
        decay = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params))
        return example_losses(params, batch).mean() + 1e-3 * decay, {"decay": decay}

    assert_same_in_microbatches(loss_of)


def test_metrics():
    def loss_of(params, batch, key):
        logits, losses = logits_of(params, batch["x"]), example_losses(params, batch)
        right = (logits.argmax(axis=-1) == batch["y"]).astype(jnp.float32)
        per_class = jax.ops.segment_sum(right, batch["y"], num_segments=8)
        seen = jax.ops.segment_sum(jnp.ones_like(right), batch["y"], num_segments=8)
        return losses.mean(), {
            "accuracy": right.mean(),
            "masked accuracy": (right * batch["mask"]).sum() / batch["mask"].sum(),
            "perplexity": jnp.exp(losses.mean()),
            "worst": losses.max(),
            "best": losses.min(),
            "spread": jnp.std(losses),
            "total": losses.sum(),
            "balanced accuracy": (per_class / jnp.maximum(seen, 1)).mean(),
            "confidence of the right": (jax.nn.softmax(logits).max(axis=-1) * right).sum() / right.sum(),
            "all": losses,
            "wrong": (logits.argmax(axis=-1) != batch["y"]).sum(),
        }

    assert_same_in_microbatches(loss_of)


def test_what_the_model_says_of_every_example_comes_back_whole():
    def loss_of(params, batch, key):
        logits = logits_of(params, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        wrong = jnp.isnan(logits)
        told = {"logits": logits, "turned": logits.T, "best": logits.argmax(-1), "any": wrong.any(), "all": wrong.all()}
        return losses.mean(), told

    assert_same_in_microbatches(loss_of)


def test_features_that_are_padded():
    def loss_of(params, batch, key):
        logits = logits_of(params, batch["x"])
        padded = [jnp.pad(logits, ((0, 0), (1, 2)), mode=mode) for mode in ("edge", "mean", "linear_ramp", "reflect")]
        return jnp.square(jnp.concatenate(padded, 1) * jnp.linspace(0.1, 1.0, 44)).mean(), {}

    assert_same_in_microbatches(loss_of)


def test_a_mean_whose_sum_and_count_one_loop_carries():
    def loss_of(params, batch, key):
        weights = batch["mask"][:, None] * jnp.arange(16)

        def chunk(carry, columns):
            x, weight = columns
            total, count = carry
            return (total + (jnp.tanh(x * params["up"][0, 0]) * weight).sum(), count + weight.sum()), None

        (total, count), _ = jax.lax.scan(chunk, (0.0, 0.0), (batch["x"].T, weights.T))
        hidden = jax.lax.scan(chunk, (0.0, 0.0), (logits_of(params, batch["x"]).T, weights[:, :8].T))[0]
        return total / count + hidden[0] / hidden[1], {"count": count}

    assert_same_in_microbatches(loss_of)


def test_dropout_masks_are_those_of_the_whole_batch():
    def masks(state, batch):
        return state, jax.random.bernoulli(state["key"], 0.5, batch["x"].shape)

    def loss_of(params, batch, key):
        x = batch["x"] * jax.random.bernoulli(key, 0.8, batch["x"].shape) / 0.8
        return example_losses(params, batch | {"x": x}).mean(), {}

    assert_same_in_microbatches(loss_of)
    assert_same_training(masks, create_classifier, [examples(0)], tolerance=0, microbatches=4)


def test_half_precision_compute_with_float32_state():
    """Bound: twice what the undecorated step differs from one in float32."""

    def loss_of(params, batch, key):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        losses = example_losses(half, batch | {"x": batch["x"].astype(jnp.bfloat16)})
        return losses.astype(jnp.float32).mean(), {}

    assert_same_in_microbatches(loss_of, tolerance=4e-2)


def test_steps_that_look_at_the_batch_before_they_work_on_it():
    """Its mean, a loop until something about it holds, and a choice by its sum: each a short loop of its own."""

    def loss_of(params, batch, key):
        halvings, _ = jax.lax.while_loop(
            lambda c: c[1] > 0.1, lambda c: (c[0] + 1, c[1] / 2), (0, jnp.abs(batch["x"]).mean())
        )
        x = (batch["x"] - batch["x"].mean(axis=0)) * 0.9**halvings
        x = jax.lax.cond(batch["x"].sum() > 0, jnp.sin, jnp.cos, x)
        return example_losses(params, batch | {"x": x}).mean(), {"halvings": halvings}

    assert_same_in_microbatches(loss_of)


def test_axes_left_to_xla():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec(None, "tensor"))

    def loss_of(params, batch, key):
        def layer(hidden, _):
            return jax.lax.with_sharding_constraint(jnp.tanh(hidden @ params["square"]), split), None

        hidden = jax.lax.with_sharding_constraint(jnp.tanh(batch["x"] @ params["up"]), split)
        hidden, _ = jax.lax.scan(layer, hidden, None, length=2)
        losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["down"], batch["y"])
        return (losses * batch["mask"]).sum() / batch["mask"].sum(), {}

    def create(key):
        state = create_classifier(key)
        params = state["params"] | {"square": 0.5 * jnp.eye(32)}
        return state | {"params": params, "opt_state": DESCENT.init(params)}

    assert_same_training(training(loss_of), create, [examples(0), examples(1)], {"4x2": mesh}, microbatches=4)


def test_a_loss_is_printed_once(capfd):
    def loss_of(params, batch, key):
        loss = example_losses(params, batch).mean()
        jax.debug.print("loss {}", loss)
        return loss, {}

    step = deepcompile.shard(training(loss_of), TWO_MESHES["8"], microbatches=4)
    jax.block_until_ready(step(create_classifier(jax.random.key(0)), examples(0)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("loss ") == 1


def tokens(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (16, 17), np.int32)


@pytest.mark.parametrize(
    ("policy", "meshes"),
    [pytest.param(None, ["8"], marks=pytest.mark.slow), (jax.checkpoint_policies.nothing_saveable, ["2x4", "1"])],
    ids=["saved", "checkpointed"],
)
def test_loops_of_layers(policy, meshes):
    model = llama.Llama(dataclasses.replace(llama.LLAMA_TINY, remat_policy=policy))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), DESCENT)

    def create(key):
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch):
        def loss_of(params):
            return llama.next_token_loss(state.apply_fn({"params": params}, batch[:, :-1]), batch[:, 1:])

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    chosen = {name: (MESHES | ONES)[name] for name in meshes}
    assert_same_training(step, create, [tokens(0), tokens(1)], chosen, microbatches=2)


CAPPED = dataclasses.replace(mixtral.MIXTRAL_TINY, capacity_factor=1.25)


def mixtral_loss(model, batch):
    logits, balance = model(batch[:, :-1])
    return mixtral.next_token_loss(logits, batch[:, 1:]) + 0.01 * balance


def vit_loss(model, batch):
    return vit.classification_loss(model(batch["image"], train=True), batch["label"])


def images(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "image": random.standard_normal((16, 16, 16, 3), np.float32),
        "label": random.integers(0, 10, 16, np.int32),
    }


@pytest.mark.parametrize(
    ("build", "loss_of", "make_batch", "meshes"),
    [
        pytest.param(
            lambda: mixtral.Mixtral(mixtral.MIXTRAL_TINY, rngs=nnx.Rngs(0)),
            mixtral_loss,
            tokens,
            ["8", "2x4"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: mixtral.Mixtral(CAPPED, rngs=nnx.Rngs(0)), mixtral_loss, tokens, ["8"], marks=pytest.mark.slow
        ),
        (lambda: vit.ViT(vit.VIT_TINY, rngs=nnx.Rngs(0)), vit_loss, images, ["2x4"]),
    ],
    ids=["mixtral", "capped mixtral", "vit"],
)
def test_nnx_objects(build, loss_of, make_batch, meshes):
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    def create():
        model = build()
        return model, nnx.Optimizer(model, DESCENT, wrt=nnx.Param)

    plain, (model, optimizer) = nnx.jit(step), create()
    losses, states = [], []
    for seed in range(2):
        losses.append(plain(model, optimizer, make_batch(seed)))
        states.append(jax.tree.map(jnp.copy, nnx.state((model, optimizer))))
    for mesh in meshes:
        sharded = deepcompile.shard(step, (MESHES | ONES)[mesh], microbatches=2)
        model, optimizer = sharded.init(create)
        for seed in range(2):
            loss = sharded(model, optimizer, make_batch(seed))
            assert_close(loss, losses[seed], 1e-5, f"loss of step {seed}")
            assert_close(
                nnx.state((model, optimizer)), states[seed], 2e-5, f"state after step {seed}", "['key']['bias']"
            )


def scaled(x, scale):
    return x * scale.reshape(1, 1, -1).astype(jnp.bfloat16).astype(jnp.float32) + jnp.sin(x), None


def multiplied(x, matrix):
    """The matrix in half precision is saved for the backward pass, though no microbatch changes it."""
    half = matrix.reshape(8, 8).astype(jnp.bfloat16)
    product = x.reshape(-1, 8).astype(jnp.bfloat16) @ half
    return x + jnp.tanh(product.astype(jnp.float32)).reshape(x.shape), None


@pytest.mark.parametrize("layer", [scaled, multiplied])
def test_parameters_that_are_cast_in_a_loop_over_layers(layer):
    """Their gradients are rounded in the loop to half precision, each microbatch's by itself, and added in float32."""

    def loss_of(params, batch):
        return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads), loss

    random = np.random.default_rng(0)
    params = jnp.asarray(random.normal(size=(3, 64)), jnp.float32)
    batch = jnp.asarray(random.normal(size=(32, 4, 64)), jnp.float32)
    expected = jax.jit(step)(params, batch)
    for mesh in TWO_MESHES.values():
        got = deepcompile.shard(step, mesh, microbatches=2)(params, batch)
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)
        np.testing.assert_allclose(got[0], expected[0], atol=2**-8 * float(jnp.abs(expected[0] - params).max()))


ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "gelu": jax.nn.gelu, "softmax": jax.nn.softmax}


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    masked=st.booleans(),
    scale=st.sampled_from([1.0, 8.0]),
    tied=st.booleans(),
    clipped=st.booleans(),
    decayed=st.booleans(),
    dropout=st.booleans(),
    microbatches=st.sampled_from([2, 4]),
    mesh=st.sampled_from(sorted(TWO_MESHES)),
)
def test_random_steps(activation, masked, scale, tied, clipped, decayed, dropout, microbatches, mesh):
    optimizer = optax.chain(
        *[optax.clip_by_global_norm(0.1)] * clipped, *[optax.add_decayed_weights(0.1)] * decayed, DESCENT
    )

    def loss_of(params, batch, key):
        hidden = ACTIVATIONS[activation](batch["x"] @ params["up"] + params["bias"])
        hidden = hidden * jax.random.bernoulli(key, 0.5, hidden.shape) if dropout else hidden
        logits = hidden @ (params["up"].T[:, :8] if tied else params["down"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        loss = (losses * batch["mask"]).sum() / batch["mask"].sum() if masked else losses.mean()
        return loss * scale, {"hidden": hidden.max(), "logits": logits.mean(axis=0)}

    def create(key):
        return create_classifier(key, optimizer)

    assert_same_training(
        training(loss_of, optimizer), create, [examples(0)], {mesh: TWO_MESHES[mesh]}, microbatches=microbatches
    )


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_gradients_that_go_through_the_weights_statistics(microbatches, layers):
    """Standardised weights: the complete gradient meets the weight, which backward gathered again and so waited for."""

    def standardised(w):
        w = w - w.mean(0)
        return w / (w.std(0) + 1e-3)

    def loss_of(params, batch):
        x = batch["x"]
        for w in params["layers"]:
            x = jax.nn.relu(x @ standardised(w))
        return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients), loss

    random = np.random.default_rng(0)
    params = {"layers": [random.normal(size=(32, 32)) for _ in range(layers)], "out": np.ones((32, 8))}
    params = jax.tree.map(lambda leaf: np.float32(leaf / 8), params)
    batch = {"x": np.float32(random.normal(size=(32, 32))), "y": np.ones((32, 8), np.float32)}
    sharded = deepcompile.shard(step, {"fsdp": 8}, microbatches=microbatches, passes=())
    expected = jax.jit(step)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), sharded(params, batch), expected)
