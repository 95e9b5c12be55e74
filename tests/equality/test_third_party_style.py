"""Steps as other people write them, the whole step and not only its loss, against the same step on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

from tests.equality.harness import MESHES, assert_same_training

pytestmark = pytest.mark.cpu_mesh

B, D, H = 16, 16, 32
MLP = {"w1": (D, H), "b1": (H,), "w2": (H, D), "b2": (D,)}

Step = tuple[Callable, Callable]
"""``(step, create_state)``."""

STEPS: dict[str, Callable[[], Step]] = {}


def add(make: Callable[[], Step]) -> Callable[[], Step]:
    STEPS[make.__name__] = make
    return make


def draw(key, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    keys = jax.random.split(key, len(shapes))
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def mlp(p, x):
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def squares(y, target):
    return jnp.mean((y - target) ** 2)


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-2, eps=1e-3)


def trained(loss: Callable, shapes: dict[str, tuple[int, ...]], tx: optax.GradientTransformation | None = None) -> Step:
    tx = tx or adam()

    def create(key):
        params = draw(key, shapes)
        return {"params": params, "opt_state": tx.init(params)}

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": value}

    return step, create


@add
def private_gradients() -> Step:
    """Gradients of every example, clipped one by one, and noise from a key in the state."""
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def create(key):
        params = draw(key, MLP)
        return {"params": params, "opt_state": tx.init(params), "key": key}

    def step(state, batch):
        one = jax.grad(lambda p, x, y: squares(mlp(p, x), y))
        grads = jax.vmap(one, (None, 0, 0))(state["params"], batch["x"], batch["y"])
        norms = jax.vmap(optax.tree.norm)(grads)
        key, noise = jax.random.split(state["key"])
        scale = jnp.minimum(1, 0.1 / norms)
        grads = jax.tree.map(lambda g: jnp.einsum("b...,b->...", g, scale) / B, grads)
        grads = jax.tree.map(lambda g, n: g + 0.01 * n, grads, optax.tree.random_like(noise, grads))
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"clipped": (norms > 0.1).mean()}

    return step, create


@add
def loss_scaling_and_average() -> Step:
    """A named tuple of leaves of many kinds; a branch skips the update where a gradient is not finite."""

    class State(NamedTuple):
        params: Any
        average: Any
        opt_state: Any
        step: Any
        key: Any
        raw_key: Any
        skipped: Any
        scale: Any
        nothing: Any

    tx = optax.lion(1e-2)

    def create(key):
        params = draw(key, MLP)
        skipped, scale = jnp.zeros((), bool), jnp.float32(2**10)
        return State(params, params, tx.init(params), 0, key, jax.random.PRNGKey(3), skipped, scale, {})

    def step(state, batch):
        key, dropout = jax.random.split(state.key)

        def loss(p):
            hidden = jnp.tanh(batch["x"] @ p["w1"] + p["b1"])
            hidden = jnp.where(jax.random.bernoulli(dropout, 0.8, hidden.shape), hidden / 0.8, 0)
            return squares(hidden @ p["w2"] + p["b2"], batch["y"]) * state.scale

        def apply(old):
            updates, opt_state = tx.update(grads, old[1], old[0])
            return optax.apply_updates(old[0], updates), opt_state

        value, grads = jax.value_and_grad(loss)(state.params)
        grads = jax.tree.map(lambda g: g / state.scale, grads)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        params, opt_state = lax.cond(finite, apply, lambda old: old, (state.params, state.opt_state))
        average = optax.incremental_update(params, state.average, 0.1)
        raw_key = jax.random.fold_in(state.raw_key, state.step)
        scale = jnp.where(finite, state.scale * 2, state.scale / 2)
        new = State(params, average, opt_state, state.step + 1, key, raw_key, ~finite, scale, {})
        return new, {"loss": value / state.scale}

    return step, create


@add
def adversaries() -> Step:
    """Two Linen train states, trained against each other in one step."""

    class Network(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(nn.leaky_relu(nn.Dense(H)(x)))

    generator, critic = Network(D), Network(1)
    tx, cross_entropy = optax.adam(2e-3, b1=0.5, eps=1e-3), optax.sigmoid_binary_cross_entropy

    def create(key):
        keys = jax.random.split(key)
        start = [generator.init(keys[0], jnp.ones((1, 8))), critic.init(keys[1], jnp.ones((1, D)))]
        return tuple(
            TrainState.create(apply_fn=net.apply, params=params, tx=tx)
            for net, params in zip((generator, critic), start, strict=True)
        )

    def step(states, batch):
        made, judged = states
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(7), judged.step), (batch["x"].shape[0], 8))

        def critic_loss(params):
            fake = lax.stop_gradient(generator.apply(made.params, noise))
            real = cross_entropy(critic.apply(params, batch["x"]), 1.0).mean()
            return real + cross_entropy(critic.apply(params, fake), 0.0).mean()

        def generator_loss(params):
            return cross_entropy(critic.apply(judged.params, generator.apply(params, noise)), 1.0).mean()

        judge, judge_grads = jax.value_and_grad(critic_loss)(judged.params)
        make, make_grads = jax.value_and_grad(generator_loss)(made.params)
        new = made.apply_gradients(grads=make_grads), judged.apply_gradients(grads=judge_grads)
        return new, {"critic": judge, "generator": make}

    return step, create


@add
def policy_epochs() -> Step:
    """Advantages by a backward scan, then epochs of shuffled minibatches that train inside two scans."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), adam())

    def create(key):
        params = draw(key, MLP)
        return {"params": params, "opt_state": tx.init(params), "key": key}

    def step(state, batch):
        def back(carry, step):
            reward, value = step
            carry = reward - value + 0.9 * carry
            return carry, carry

        rewards, values = batch["seq"][..., 0].T, batch["seq"][..., 1].T
        _, advantages = lax.scan(back, jnp.zeros(B), (rewards, values), reverse=True)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-3)
        seen, actions, weights = batch["seq"].reshape(-1, D), batch["tokens"].reshape(-1) % D, advantages.T.reshape(-1)

        def minibatch(carry, rows):
            params, opt_state = carry

            def loss(p):
                log_probs = jax.nn.log_softmax(mlp(p, seen[rows]))
                chosen = jnp.take_along_axis(log_probs, actions[rows][:, None], 1)[:, 0]
                return -(chosen * weights[rows]).mean()

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        def epoch(carry, key):
            return lax.scan(minibatch, carry, jax.random.permutation(key, seen.shape[0]).reshape(3, -1))

        key, *epochs = jax.random.split(state["key"], 3)
        (params, opt_state), losses = lax.scan(epoch, (state["params"], state["opt_state"]), jnp.stack(epochs))
        return {"params": params, "opt_state": opt_state, "key": key}, {"losses": losses}

    return step, create


@add
def replay_buffer() -> Step:
    """Examples written to and read from a buffer in the state; a target network copied now and then."""

    def create(key):
        params = draw(key, MLP)
        return {"params": params, "target": params, "seen": jnp.zeros((64, D)), "count": 0, "key": key}

    def step(state, batch):
        key, pick = jax.random.split(state["key"])
        seen = state["seen"].at[(state["count"] + jnp.arange(B)) % 64].set(batch["x"])
        x = seen[jax.random.randint(pick, (B,), 0, jnp.minimum(state["count"] + B, 64))]

        def loss(p):
            wanted = mlp(state["target"], x).max(-1) * 0.9 + 1
            return optax.huber_loss(mlp(p, x)[:, 0], lax.stop_gradient(wanted)).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.05 * g, state["params"], grads)
        target = optax.periodic_update(params, state["target"], state["count"], 32)
        new = {"params": params, "target": target, "seen": seen, "count": state["count"] + B, "key": key}
        return new, {"loss": value}

    return step, create


@add
def sharpness_and_curvature() -> Step:
    """Gradients at a point moved by another gradient, divided by an estimate of the Hessian's diagonal."""

    def create(key):
        params = draw(key, MLP)
        return {"params": params, "curvature": optax.tree.zeros_like(params), "key": key}

    def step(state, batch):
        def loss(p):
            return squares(mlp(p, batch["x"]), batch["y"])

        params = state["params"]
        uphill = jax.grad(loss)(params)
        norm = optax.tree.norm(uphill)
        value, grads = jax.value_and_grad(loss)(jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, uphill))
        key, probe = jax.random.split(state["key"])
        signs = optax.tree.random_like(probe, params, jax.random.rademacher)
        signs = jax.tree.map(lambda s: s.astype(jnp.float32), signs)
        _, bent = jax.jvp(jax.grad(loss), (params,), (signs,))
        curvature = jax.tree.map(lambda h, s, b: 0.9 * h + 0.1 * s * b, state["curvature"], signs, bent)
        params = jax.tree.map(lambda p, g, h: p - 0.01 * g / jnp.maximum(jnp.abs(h), 0.1), params, grads, curvature)
        return {"params": params, "curvature": curvature, "key": key}, {"loss": value}

    return step, create


@add
def learning_to_learn() -> Step:
    """Every example is a task: an inner step of gradient descent, differentiated."""

    def loss(p, batch):
        def task(seen, asked):
            grads = jax.grad(lambda p: squares(mlp(p, seen), seen))(p)
            return squares(mlp(jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), asked), asked)

        return jax.vmap(task)(batch["seq"][:, :3], batch["seq"][:, 3:]).mean()

    return trained(loss, MLP)


@add
def linear_recurrent_unit() -> Step:
    """Complex eigenvalues and an associative scan."""

    def loss(p, batch):
        decay = jnp.exp(-jnp.exp(p["rate"]) + 1j * p["angle"])
        inputs = batch["seq"] @ (p["real"] + 1j * p["imag"])

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, hidden = lax.associative_scan(combine, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1)
        return squares((hidden @ p["out"]).real, batch["seq"])

    return trained(loss, {"rate": (H,), "angle": (H,), "real": (D, H), "imag": (D, H), "out": (H, D)}, optax.lion(1e-3))


@add
def experts_of_limited_capacity() -> Step:
    """Top-2 routing; a token's place in its expert's queue is counted over the whole batch."""
    experts, capacity = 4, 8

    def loss(p, batch):
        gates = jax.nn.softmax(batch["x"] @ p["gate"])
        weights, chosen = lax.top_k(gates, 2)
        routed = jax.nn.one_hot(chosen, experts)
        queued = routed.transpose(1, 0, 2).reshape(2 * B, experts)
        place = (jnp.cumsum(queued, 0) * queued - 1).reshape(2, B, experts).transpose(1, 0, 2)
        slots = jax.nn.one_hot(place.astype(jnp.int32), capacity)
        inputs = jnp.einsum("bkec,bd->ecd", slots, batch["x"])
        outputs = jnp.einsum("ech,ehd->ecd", nn.gelu(jnp.einsum("ecd,edh->ech", inputs, p["w1"])), p["w2"])
        mixed = jnp.einsum("bk,bke,bkec,ecd->bd", weights, routed, slots, outputs)
        balance = experts * jnp.sum(gates.mean(0) * routed[:, 0].mean(0))
        return squares(mixed, batch["y"]) + 0.01 * balance

    return trained(loss, {"gate": (D, experts), "w1": (experts, D, H), "w2": (experts, H, D)})


@add
def vector_quantization() -> Step:
    """The nearest of a codebook, with straight-through gradients."""

    def loss(p, batch):
        z = batch["x"] @ p["w1"]
        nearest = jnp.argmin(jnp.sum((z[:, None] - p["codes"]) ** 2, -1), 1)
        code = p["codes"][nearest]
        used = jax.nn.one_hot(nearest, 24).mean(0)
        perplexity = jnp.exp(-jnp.sum(used * jnp.log(used + 1e-9)))
        decoded = (z + lax.stop_gradient(code - z)) @ p["w2"]
        pulled = squares(lax.stop_gradient(z), code) + 0.25 * squares(z, lax.stop_gradient(code))
        return squares(decoded, batch["y"]) + pulled + 1e-3 * perplexity

    return trained(loss, {"w1": (D, H), "codes": (24, H), "w2": (H, D)})


@add
def fixed_point() -> Step:
    """A layer that is the limit of a ``while`` loop, with gradients from another."""

    def solve(update, start):
        def unfinished(state):
            return (jnp.abs(state[0] - state[1]).max() > 1e-6) & (state[2] < 50)

        return lax.while_loop(unfinished, lambda s: (update(s[0]), s[0], s[2] + 1), (update(start), start, 0))[0]

    def cell(z, w, x):
        return jnp.tanh(0.3 * z @ w + x)

    @jax.custom_vjp
    def limit(w, x):
        return solve(lambda z: cell(z, w, x), jnp.zeros_like(x))

    def forward(w, x):
        z = limit(w, x)
        return z, (w, x, z)

    def backward(saved, g):
        w, x, z = saved
        _, through_z = jax.vjp(lambda z: cell(z, w, x), z)
        _, through_inputs = jax.vjp(lambda w, x: cell(z, w, x), w, x)
        return through_inputs(solve(lambda u: g + through_z(u)[0], g))

    limit.defvjp(forward, backward)
    return trained(lambda p, batch: squares(limit(p["w"], batch["x"]), batch["y"]), {"w": (D, D)})


@add
def messages_on_a_graph() -> Step:
    """Nodes are examples; edges meet them by segment sums and a softmax over each node's edges."""

    def loss(p, batch):
        source, target = batch["tokens"][:, 0] % B, batch["tokens"][:, 1] % B
        hidden = jnp.tanh(batch["x"] @ p["w1"])
        messages = hidden[source] * nn.sigmoid(hidden[target])
        scores = messages @ p["attend"]
        scores = jnp.exp(scores - jax.ops.segment_max(scores, target, B)[target])
        scores = scores / jax.ops.segment_sum(scores, target, B)[target]
        return squares(jax.ops.segment_sum(scores[:, None] * messages, target, B) @ p["w2"], batch["y"])

    return trained(loss, {"w1": (D, H), "attend": (H,), "w2": (H, D)})


def make_batch(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((B, D), np.float32),
        "y": random.standard_normal((B, D), np.float32),
        "seq": random.standard_normal((B, 6, D), np.float32),
        "tokens": random.integers(0, 64, (B, 6), np.int32),
    }


@pytest.mark.parametrize("name", STEPS)
def test_equals_the_step_on_one_device(name: str):
    step, create_state = STEPS[name]()
    assert_same_training(step, create_state, [make_batch(seed) for seed in range(2)], {"2x4": MESHES["2x4"]})
