"""One small step for every construct the partitioner promises to handle, against the same step on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from tests.equality.harness import assert_same_training

pytestmark = pytest.mark.cpu_mesh

D, H, V = 16, 32, 24


class Case(NamedTuple):
    """A step: parameters, the loss of ``(params, batch)``, and the optimizer."""

    params: dict[str, tuple[int, ...]]
    loss: Callable
    optimizer: optax.GradientTransformation | None = None


CASES: dict[str, Case] = {}


def case(params: dict[str, tuple[int, ...]], optimizer: optax.GradientTransformation | None = None):
    def add(loss: Callable) -> Callable:
        CASES[loss.__name__] = Case(params, loss, optimizer)
        return loss

    return add


def adam() -> optax.GradientTransformation:
    """Its epsilon is large, or it would blow rounding in tiny gradients up to the size of an update."""
    return optax.adam(1e-2, eps=1e-3)


def squares(y, target) -> jax.Array:
    return jnp.mean((y - target) ** 2)


MLP = {"w1": (D, H), "b1": (H,), "w2": (H, D), "b2": (D,)}


def mlp(p, x):
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


@case(MLP)
def dense(p, batch):
    return squares(mlp(p, batch["x"]), batch["y"])


@case(MLP, optax.chain(optax.clip_by_global_norm(0.01), adam()))
def clipping_by_global_norm(p, batch):
    return squares(mlp(p, batch["x"]), batch["y"])


@case(MLP, optax.MultiSteps(adam(), every_k_schedule=2).gradient_transformation())
def multi_steps(p, batch):
    return squares(mlp(p, batch["x"]), batch["y"])


@case(MLP, optax.inject_hyperparams(optax.adamw)(learning_rate=optax.cosine_decay_schedule(1e-2, 10), eps=1e-3))
def injected_schedule(p, batch):
    return squares(mlp(p, batch["x"]), batch["y"])


@case(MLP, optax.adafactor(1e-2, min_dim_size_to_factor=8))
def factored_second_moments(p, batch):
    return squares(mlp(p, batch["x"]), batch["y"])


@case(MLP, optax.lamb(1e-2, eps=1e-3))
def trust_ratio(p, batch):
    return squares(mlp(p, batch["x"]), batch["y"])


@case(MLP, optax.chain(optax.ema(0.9), adam()))
def moving_average(p, batch):
    return squares(mlp(p, batch["x"]), batch["y"])


FREEZE = {"w1": "train", "b1": "freeze", "w2": "freeze", "b2": "train"}


@case(MLP, optax.multi_transform({"train": adam(), "freeze": optax.set_to_zero()}, FREEZE))
def partly_frozen(p, batch):
    return squares(mlp(p, batch["x"]), batch["y"])


@case(MLP)
def masked_mean(p, batch):
    error = jnp.sum((mlp(p, batch["x"]) - batch["y"]) ** 2, -1)
    return jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"])


@case({"w1": (D, H), "w2": (H, D), "a": (D, 4), "b": (4, H)})
def low_rank_adapter(p, batch):
    frozen = lax.stop_gradient({"w1": p["w1"], "w2": p["w2"]})
    return squares(jnp.tanh(batch["x"] @ (frozen["w1"] + p["a"] @ p["b"])) @ frozen["w2"], batch["y"])


@case({"embed": (V, D), "w": (D, D)})
def tied_embedding(p, batch):
    x = p["embed"][batch["tokens"]] @ p["w"]
    logits = jnp.einsum("btd,vd->btv", x, p["embed"])
    labels = jnp.roll(batch["tokens"], -1, 1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@case({"embed": (V, D), "w": (D, V)})
def one_hot_and_explicit_indices(p, batch):
    x = jax.nn.one_hot(batch["tokens"], V) @ p["embed"]
    log_probs = jax.nn.log_softmax(x.mean(1) @ p["w"])
    return -log_probs[jnp.arange(log_probs.shape[0]), batch["tokens"][:, 0]].mean()


@case({"scale": (D,), "bias": (D,), "w": (D, D)})
def batch_norm(p, batch):
    mean, var = batch["x"].mean(0), batch["x"].var(0)
    x = (batch["x"] - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]
    return squares(x @ p["w"], batch["y"])


@case({"qkv": (D, 3, 2, 8), "out": (2, 8, D), "scale": (D,)})
def attention(p, batch):
    x = batch["seq"]
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]
    q, k, v = jnp.einsum("btd,dzhc->zbthc", x, p["qkv"])
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / 8**0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores), v)
    return squares(jnp.einsum("bqhc,hcd->bqd", mixed, p["out"]), batch["seq"])


STACK = {"w": (4, D, D), "b": (4, D)}


@case(STACK)
def layer_scan(p, batch):
    x, _ = lax.scan(lambda x, layer: (jnp.tanh(x @ layer["w"] + layer["b"]), None), batch["x"], p)
    return squares(x, batch["y"])


@case(STACK)
def layer_scan_with_remat(p, batch):
    layer = jax.checkpoint(lambda x, layer: (x + jnp.tanh(x @ layer["w"] + layer["b"]), x.mean()))
    x, means = lax.scan(layer, batch["x"], p)
    return squares(x, batch["y"]) + 1e-3 * means.sum()


@case(STACK)
def reversed_layer_scan(p, batch):
    x, _ = lax.scan(lambda x, layer: (jnp.tanh(x @ layer["w"] + layer["b"]), None), batch["x"], p, reverse=True)
    return squares(x, batch["y"])


@case({"w": (2, 2, D, D)})
def nested_layer_scans(p, batch):
    def group(x, layers):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)

    return squares(lax.scan(group, batch["x"], p["w"])[0], batch["y"])


@case(MLP)
def unrolled_remat(p, batch):
    block = jax.checkpoint(lambda p, x: x + mlp(p, x), policy=jax.checkpoint_policies.dots_saveable)
    return squares(block(p, block(p, batch["x"])), batch["y"])


@case({"wx": (D, H), "wh": (H, H), "out": (H, D)})
def recurrent_network(p, batch):
    def cell(h, x):
        h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
        return h, h

    x = jnp.swapaxes(batch["seq"], 0, 1)
    _, hidden = lax.scan(cell, jnp.zeros((x.shape[1], H)), x)
    return squares(jnp.swapaxes(hidden, 0, 1) @ p["out"], batch["seq"])


@case(MLP)
def accumulation_by_hand(p, batch):
    micro = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), {"x": batch["x"], "y": batch["y"]})
    total, _ = lax.scan(lambda total, b: (total + squares(mlp(p, b["x"]), b["y"]), None), 0.0, micro)
    return total / 2


@case(MLP)
def mapped_over_examples(p, batch):
    return lax.map(lambda xy: squares(mlp(p, xy[0]), xy[1]), (batch["x"], batch["y"])).mean()


@case(MLP)
def while_loop_and_cond(p, batch):
    halvings, _ = lax.while_loop(lambda c: c[1] > 0.1, lambda c: (c[0] + 1, c[1] / 2), (0, jnp.abs(batch["x"]).mean()))
    x = lax.stop_gradient(halvings).astype(jnp.float32) * 0.1 + batch["x"]
    y = lax.cond(batch["x"].sum() > 0, lambda x: mlp(p, x), lambda x: mlp(p, -x) * 2, x)
    y = lax.switch(jnp.int32(1), [lambda y: y, lambda y: y * p["b2"]], y)
    return squares(y, batch["y"])


@case(MLP)
def while_loop_of_every_example(p, batch):
    """Each halves its features as often as it needs; the loop goes on until the last is done."""
    x = jax.vmap(lambda x: lax.while_loop(lambda x: jnp.abs(x).max() > 0.5, lambda x: x / 2, x))(batch["x"])
    return squares(mlp(p, x), batch["y"])


@case(MLP)
def custom_derivatives(p, batch):
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))

    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] ** 2 * tangents[0]))
    return squares(cube(clipped(mlp(p, batch["x"]))), batch["y"])


@case(MLP)
def second_order(p, batch):
    def inner(x):
        return mlp(p, x).sum()

    slope = jax.vmap(jax.grad(inner))(batch["x"])
    return squares(mlp(p, batch["x"]), batch["y"]) + jnp.mean(jnp.sum(slope**2, -1))


@case({"w": (D, D), "v": (D, D)})
def contrastive(p, batch):
    a, b = batch["x"] @ p["w"], batch["y"] @ p["v"]
    logits = a @ b.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(logits.shape[0])).mean()


@case({"kernel": (3, 3, 3, 8), "depthwise": (3, 3, 1, 8), "dense": (8, D)})
def convolutions(p, batch):
    numbers = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(batch["image"], p["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
    x = lax.conv_general_dilated(
        nn.relu(x), p["depthwise"], (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=8
    )
    x = nn.max_pool(x, (2, 2), (2, 2)) + nn.avg_pool(x, (2, 2), (2, 2))
    return squares(x.mean((1, 2)) @ p["dense"], batch["y"])


@case({"w": (D, D)})
def resized_and_padded(p, batch):
    image = jax.image.resize(batch["image"], (batch["image"].shape[0], 4, 4, 3), "bilinear")
    x = jnp.pad(image.reshape(image.shape[0], -1), ((0, 0), (0, 2)))[:, ::2]
    x = jnp.concatenate([x[:, :D], jnp.flip(batch["x"], 1)], 1)[:, 5 : 5 + D]
    return squares(x @ p["w"], batch["y"])


@case({"w": (D, D), "gate": (D, 4), "experts": (4, D, D)})
def mixture_of_experts(p, batch):
    weights, chosen = lax.top_k(jax.nn.softmax(batch["x"] @ p["gate"]), 2)
    dispatched = jax.nn.one_hot(chosen, 4) * weights[..., None]
    y = jnp.einsum("bd,edf,bke->bf", batch["x"] @ p["w"], p["experts"], dispatched)
    return squares(y, batch["y"])


@case({"w": (D, D)})
def sorting_and_cumulating(p, batch):
    x = jnp.cumsum(jnp.sort(batch["x"] @ p["w"], axis=1), axis=1)
    ranks = jnp.argsort(batch["x"], axis=1)
    x = jnp.take_along_axis(x, ranks, axis=1) + lax.cumlogsumexp(x, axis=1) * 0.1
    return squares(x, batch["y"]) + 0.1 * jnp.max(jnp.abs(x))


@case({"w": (D, D)})
def orthogonality_penalty(p, batch):
    gram = p["w"].T @ p["w"] - jnp.eye(D)
    return squares(batch["x"] @ p["w"], batch["y"]) + 1e-2 * jnp.sum(gram**2)


@case({"v": (D, D), "g": (D,)})
def weight_norm(p, batch):
    w = p["v"] / jnp.linalg.norm(p["v"], axis=0, keepdims=True) * p["g"]
    return squares(batch["x"] @ w, batch["y"])


@case({"w": (D, D)})
def decompositions(p, batch):
    outer = jnp.einsum("bi,bj->bij", batch["x"], batch["x"]) + 2 * jnp.eye(D)
    factor = jnp.linalg.cholesky(outer)
    x = jax.scipy.linalg.solve_triangular(factor, (batch["x"] @ p["w"])[..., None], lower=True)[..., 0]
    spectrum = jnp.abs(jnp.fft.rfft(batch["x"] @ p["w"], axis=-1)) ** 2
    return squares(x, batch["y"]) + 1e-3 * spectrum.mean()


@case({"odd": (7, 5), "w": (D, 7), "v": (5, D), "b": (3,)})
def nothing_divides(p, batch):
    return squares(batch["x"] @ p["w"] @ p["odd"] @ p["v"], batch["y"]) + jnp.sum(p["b"] ** 2)


@case({"w": (D, D)})
def l2_penalty_and_scaling(p, batch):
    return 128.0 * (squares(batch["x"] @ p["w"], batch["y"]) + 1e-3 * optax.tree.norm(p) ** 2)


@case({"w": (D, D)})
def mixup_with_beta(p, batch):
    mixed = jax.random.beta(jax.random.key(0), 0.4, 0.4, (batch["x"].shape[0], 1))
    return squares((mixed * batch["x"] + (1 - mixed) * batch["y"]) @ p["w"], batch["y"])


@case({"w": (D, 3)})
def running_totals_over_examples(p, batch):
    _, totals = lax.scan(lambda t, x: (t + x,) * 2, jnp.zeros(3), batch["x"] @ p["w"])
    return jnp.mean(totals**2)


@case({"w": (D, D)})
def statistics_by_axis_name(p, batch):
    def example(x):
        y = x @ p["w"]
        return y - lax.pmean(y, "batch") + lax.psum(y, "batch") / 16 * lax.pmax(lax.stop_gradient(y), "batch")

    return squares(jax.vmap(example, axis_name="batch")(batch["x"]), batch["y"])


@case(MLP)
def two_views_in_one_batch(p, batch):
    z = mlp(p, jnp.concatenate([batch["x"], batch["y"]]))
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    first, second = jnp.split(z, 2)
    return -jnp.mean(jnp.sum(first * jnp.roll(second, 1, axis=0), -1))


@case(MLP)
def sharpness_aware_minimisation(p, batch):
    def loss_of(p):
        return squares(mlp(p, batch["x"]), batch["y"])

    grads = lax.stop_gradient(jax.grad(loss_of)(p))
    scale = 0.05 / (optax.tree.norm(grads) + 1e-6)
    return loss_of(jax.tree.map(lambda w, g: w + scale * g, p, grads))


@case({"w": (D, D)})
def batched_solve(p, batch):
    matrices = jnp.einsum("bi,bj->bij", batch["x"], batch["x"]) + 3 * jnp.eye(D)
    return squares(jnp.linalg.solve(matrices, (batch["x"] @ p["w"])[..., None])[..., 0], batch["y"])


@case({"wx": (D, 4 * D), "wh": (D, 4 * D), "b": (4 * D,)})
def long_short_term_memory(p, batch):
    def cell(carry, x):
        c, h = carry
        kernel = jnp.concatenate([p["wx"], p["wh"]])
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ kernel + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    x = jnp.swapaxes(batch["seq"], 0, 1)
    start = jnp.zeros((x.shape[1], D))
    _, hidden = lax.scan(cell, (start, start), x)
    return squares(jnp.swapaxes(hidden, 0, 1), batch["seq"])


@case({"w": (D, D)})
def functions_on_the_host(p, batch):
    """One that is called, and one that raises an error where something has gone wrong, as Equinox has them."""

    def refuse(x):
        raise ValueError(x)

    x = batch["x"] @ p["w"]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    signs = jax.pure_callback(np.sign, shape, lax.stop_gradient(x), vmap_method="broadcast_all")
    went_wrong = jnp.isnan(lax.stop_gradient(x)).any()
    signs = lax.cond(went_wrong, lambda: jax.pure_callback(refuse, shape, signs), lambda: signs)
    return squares(x * signs, batch["y"])


def make_batch(size: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((size, D), np.float32),
        "y": random.standard_normal((size, D), np.float32),
        "mask": (random.random(size) < 0.6).astype(np.float32),
        "tokens": random.integers(0, V, (size, 6), np.int32),
        "seq": random.standard_normal((size, 6, D), np.float32),
        "image": random.standard_normal((size, 8, 8, 3), np.float32),
    }


def make_step(case: Case):
    optimizer = case.optimizer or adam()

    def create_state(key):
        keys = jax.random.split(key, len(case.params))
        params = {
            name: jax.random.normal(k, shape) / max(shape[-2:][0], 1) ** 0.5
            for k, (name, shape) in zip(keys, case.params.items(), strict=True)
        }
        return {"params": params, "opt_state": optimizer.init(params)}

    def step(state, batch):
        loss, grads = jax.value_and_grad(case.loss)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return step, create_state


@pytest.mark.parametrize("name", CASES)
def test_equals_the_step_on_one_device(name: str):
    step, create_state = make_step(CASES[name])
    assert_same_training(step, create_state, [make_batch(16, seed) for seed in range(3)])


@pytest.mark.parametrize("name", ["dense", "attention", "contrastive", "batch_norm"])
def test_equals_with_one_example_a_device(name: str):
    step, create_state = make_step(CASES[name])
    assert_same_training(step, create_state, [make_batch(8, seed) for seed in range(3)])
