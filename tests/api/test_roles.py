"""What the arguments of steps of the usual forms are taken for, and what a step may have the memory of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jax_deepcompile as deepcompile
from tests.api.steps import arguments_of
from tests.equality.harness import assert_close

pytestmark = pytest.mark.cpu_mesh

_OPTIMIZER = optax.adam(1e-3)
_LOOKAHEAD = optax.lookahead(_OPTIMIZER, sync_period=2, slow_step_size=0.5)


def _model(seed: int, width: int = 64) -> dict:
    keys = jax.random.split(jax.random.key(seed))
    return {
        "Dense_0": {"kernel": jax.random.normal(keys[0], (32, width)) / 8, "bias": jnp.zeros(width)},
        "Dense_1": {"kernel": jax.random.normal(keys[1], (width, 16)) / 8, "bias": jnp.zeros(16)},
    }


def _apply(params: Mapping, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def _updated(params, opt_state, loss_of, *args):
    loss, grads = jax.value_and_grad(loss_of)(params, *args)
    updates, opt_state = _OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def _loss(params, x, y):
    return jnp.mean((_apply(params, x) - y) ** 2)


def with_target(params, target, opt_state, x, y):
    return _updated(params, opt_state, lambda p: _loss(p, x, y + 0.9 * _apply(target, x)))


def with_average(params, average, opt_state, batch):
    params, opt_state, loss = _updated(params, opt_state, _loss, batch["x"], batch["y"])
    return params, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, average, params), opt_state, loss


def with_teacher(params, opt_state, teacher, x):
    return _updated(params, opt_state, lambda p: _loss(p, x, _apply(teacher, x)))


def with_statistics(params, batch_stats, opt_state, x, y):
    hidden = {name: jnp.mean(x) * value for name, value in batch_stats["norm"].items()}
    new, opt_state, loss = _updated(params, opt_state, _loss, x, y + hidden["mean"].sum())
    return new, {"norm": hidden}, opt_state, loss


def adversarial(g_params, d_params, g_opt, d_opt, x, y):
    g, g_opt, g_loss = _updated(g_params, g_opt, lambda p: -_loss(d_params, x, _apply(p, x)))
    d, d_opt, d_loss = _updated(d_params, d_opt, _loss, x, y)
    return g, d, g_opt, d_opt, (g_loss, d_loss)


def optimizer_in_front(opt_state, params, x, y):
    params, opt_state, loss = _updated(params, opt_state, _loss, x, y)
    return opt_state, params, loss


def one_of_two_returned(opt_state, target, params, x, y):
    return with_target(params, target, opt_state, x, y)


def with_reference(state, reference, x, y):
    params, opt_state = state
    params, opt_state, loss = _updated(params, opt_state, lambda p: _flat(p, x, y) + _flat(reference, x, y))
    return (params, opt_state), loss


def _flat(params, x, y):
    return jnp.mean((x @ params["down"] @ params["up"] - y) ** 2)


def teacher_in_front(teacher, state, x):
    params, opt_state, loss = with_teacher(state.params, state.opt_state, teacher, x)
    return state.replace(params=params, opt_state=opt_state), loss


def critic_alone(actor, critic, x):
    return teacher_in_front(actor.params, critic, x)


def with_the_last_gradients_kept(state, x):
    """As many arrays of the state are made anew, from nothing but gradients, as live on."""
    return state.apply_gradients(grads=jax.grad(_loss)(state.params, x, x[:, :16]))


def with_frozen_base(base, adapter, opt_state, x, y):
    return _updated(adapter, opt_state, lambda p: _loss(base, x @ p["down"] @ p["up"], y))


def with_center(params, center, opt_state, x, y):
    params, opt_state, loss = _updated(params, opt_state, _loss, x, y - center)
    return params, 0.9 * center + 0.1 * jnp.mean(y, axis=0, keepdims=True), opt_state, loss


def with_queue(params, queue, opt_state, x, y):
    params, opt_state, loss = _updated(params, opt_state, lambda p: _loss(p, x, y) + jnp.mean(_apply(p, x) @ queue.T))
    return params, jnp.concatenate([y, queue[:-16]]), opt_state, loss


def plain_descent(params, norms, x, y):
    loss, grads = jax.value_and_grad(_loss)(params, x, y + norms["a"]["mean"].sum())
    norms = jax.tree.map(lambda norm: norm + jnp.mean(x), norms)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), norms, loss


def by_count(count, layers, x, y):
    def loss_of(layers):
        return _loss({str(index): {"kernel": w, "bias": b} for index, (w, b) in enumerate(layers)}, x, y)

    return jax.tree.map(lambda p, g: p - 0.1 / (1 + count) * g, layers, jax.grad(loss_of)(layers))


def two_lists(first, second, opt_state, x, y):
    first, opt_state, loss = _updated(first, opt_state, lambda p: jnp.mean((x @ p[0][0] + p[0][1] - second[0][1]) ** 2))
    return first, jax.tree.map(lambda leaf: leaf + jnp.mean(y), second), opt_state, loss


def batch_in_front(x, y, params, opt_state):
    params, opt_state, loss = _updated(params, opt_state, _loss, x, y)
    return loss, params, opt_state


def target_in_front(target, params, opt_state, x, y):
    return with_target(params, target, opt_state, x, y)


def with_gradients_returned(params, target, opt_state, x, y):
    return (*with_target(params, target, opt_state, x, y), jax.grad(_loss)(params, x, y))


def with_class_weights(params, opt_state, weights, x, y):
    return _updated(params, opt_state, lambda p: _loss(p, x, y) * weights.sum())


def with_running_statistics(params, opt_state, mean, variance, x, y):
    return _updated(params, opt_state, lambda p: _loss(p, (x - mean) / variance, y))


def two_tables(inputs, outputs, ids, labels):
    def loss_of(tables):
        return jnp.mean((tables[0][ids] @ tables[1].T - jax.nn.one_hot(labels, 24)) ** 2)

    grads = jax.grad(loss_of)((inputs, outputs))
    return inputs - grads[0], outputs - grads[1]


def key_in_front(key, layers):
    key, used = jax.random.split(key)
    return key, jax.tree.map(lambda leaf: leaf + jax.random.normal(used, leaf.shape), layers)


def with_keywords(params, opt_state, **batch):
    return _updated(params, opt_state, _loss, batch["x"], batch["y"])


_X = jax.random.normal(jax.random.key(2), (16, 32))
_Y = jax.random.normal(jax.random.key(3), (16, 16))
_PARAMS, _OTHER = _model(0), _model(1)
_STATE = _OPTIMIZER.init(_PARAMS)
_SYNCED = optax.LookaheadParams.init_synced(_PARAMS)
_ADAPTER = {"down": jnp.ones((32, 8)) / 8, "up": jnp.ones((8, 32)) / 8}
_TABLES = {"down": _ADAPTER["down"], "up": jnp.ones((8, 16)) / 8}
_LAYERS = [(layer["kernel"], layer["bias"]) for layer in _PARAMS.values()]
_STATISTICS = {"norm": {"mean": jnp.ones(64), "var": jnp.ones(64)}}


def _train_state(params: dict, tx: optax.GradientTransformation = _OPTIMIZER) -> TrainState:
    return TrainState.create(apply_fn=_apply, params=params, tx=tx)


def with_schedule_that_is_only_read(params, opt_state, transform_state, batch):
    scale = 1.0 / (1 + transform_state.count)
    new, opt_state, loss = _updated(params, opt_state, lambda p, *xy: scale * _loss(p, *xy), batch["x"], batch["y"])
    return new, opt_state, loss


def with_two_sets_of_parameters(params, opt_state, batch):
    loss, grads = jax.value_and_grad(_loss)(params.fast, batch["x"], batch["y"])
    updates, opt_state = _LOOKAHEAD.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


_STEPS = [
    (with_target, (_PARAMS, _OTHER, _STATE, _X, _Y), "state: params, opt_state; read only: target; batch: x, y"),
    (
        with_average,
        (_PARAMS, _OTHER, _STATE, {"x": _X, "y": _Y}),
        "state: params, average, opt_state; batch: batch",
    ),
    (with_teacher, (_PARAMS, _STATE, _model(4, 128), _X), "state: params, opt_state; read only: teacher; batch: x"),
    (
        with_statistics,
        (_PARAMS, _STATISTICS, _STATE, _X, _Y),
        "state: params, batch_stats, opt_state; batch: x, y",
    ),
    (
        adversarial,
        (_PARAMS, _OTHER, _STATE, _STATE, _X, _Y),
        "state: g_params, d_params, g_opt, d_opt; batch: x, y",
    ),
    (
        with_two_sets_of_parameters,
        (_SYNCED, _LOOKAHEAD.init(_SYNCED), {"x": _X, "y": _Y}),
        "state: params, opt_state; batch: batch",
    ),
    (optimizer_in_front, (_STATE, _PARAMS, _X, _Y), "state: opt_state, params; batch: x, y"),
    (teacher_in_front, (_OTHER, _train_state(_PARAMS), _X), "state: state; read only: teacher; batch: x"),
    (
        critic_alone,
        (_train_state(_model(4, 128)), _train_state(_PARAMS), _X),
        "state: critic; read only: actor; batch: x",
    ),
    (
        with_the_last_gradients_kept,
        (_train_state(_PARAMS, optax.optimistic_gradient_descent(1e-3)), _X),
        "state: state; batch: x",
    ),
    (
        with_frozen_base,
        (_PARAMS, _ADAPTER, _OPTIMIZER.init(_ADAPTER), _X, _Y),
        "state: adapter, opt_state; read only: base; batch: x, y",
    ),
    (with_center, (_PARAMS, jnp.zeros((1, 16)), _STATE, _X, _Y), "state: params, center, opt_state; batch: x, y"),
    (with_queue, (_PARAMS, jnp.ones((64, 16)), _STATE, _X, _Y), "state: params, queue, opt_state; batch: x, y"),
    (
        plain_descent,
        (_PARAMS, {"a": {"mean": jnp.ones(8)}, "b": {"mean": jnp.ones(8)}}, _X, _Y),
        "state: params, norms; batch: x, y",
    ),
    (by_count, (jnp.int32(3), _LAYERS, _X, _Y), "state: layers; batch: x, y; replicated: count"),
    (
        two_lists,
        (_LAYERS[:1], [(jnp.ones((24, 8)), jnp.ones(64))], _OPTIMIZER.init(_LAYERS[:1]), _X, _Y),
        "state: first, second, opt_state; batch: x, y",
    ),
    (batch_in_front, (_X, _Y, _PARAMS, _STATE), "state: params, opt_state; batch: x, y"),
    (target_in_front, (_OTHER, _PARAMS, _STATE, _X, _Y), "state: params, opt_state; read only: target; batch: x, y"),
    (
        with_gradients_returned,
        (_PARAMS, _OTHER, _STATE, _X, _Y),
        "state: params, opt_state; read only: target; batch: x, y",
    ),
    (
        with_class_weights,
        (_PARAMS, _STATE, jnp.ones(10), _X, _Y),
        "state: params, opt_state; batch: x, y; replicated: weights",
    ),
    (
        with_running_statistics,
        (_PARAMS, _STATE, jnp.ones(32), jnp.ones(32), _X, _Y),
        "state: params, opt_state; batch: x, y; replicated: mean, variance",
    ),
    (
        two_tables,
        (jnp.ones((64, 8)), jnp.ones((24, 8)), jnp.arange(16), jnp.arange(16)),
        "state: inputs, outputs; batch: ids, labels",
    ),
    (key_in_front, (jax.random.key(0), _LAYERS), "state: layers; replicated: key"),
    (
        with_schedule_that_is_only_read,
        (_PARAMS, _STATE, optax.scale_by_schedule(lambda count: 1.0).init(_PARAMS), {"x": _X, "y": _Y}),
        "state: params, opt_state; read only: transform_state; batch: batch",
    ),
    (
        with_reference,
        ((_TABLES, _OPTIMIZER.init(_TABLES)), jax.tree.map(jnp.ones_like, _TABLES), _X, _Y),
        "state: state; read only: reference; batch: x, y",
    ),
    (
        one_of_two_returned,
        (_STATE, _OTHER, _PARAMS, _X, _Y),
        "state: opt_state, params; read only: target; batch: x, y",
    ),
]


@pytest.mark.parametrize(("step", "args", "roles"), _STEPS, ids=[step.__name__ for step, *_ in _STEPS])
def test_models_beside_the_first_are_no_batch(step, args, roles):
    args = jax.tree.map(jnp.copy, args)
    expected = jax.jit(step)(*args)
    sharded = deepcompile.shard(step)
    assert_close(sharded(*args), expected, 1e-5, step.__name__)
    assert arguments_of(sharded) == roles


def test_what_is_only_read_stays():
    sharded = deepcompile.shard(with_target)
    params, opt_state, target = jax.tree.map(jnp.copy, (_PARAMS, _STATE, _OTHER))
    for _ in range(3):
        params, opt_state, _ = sharded(params, target, opt_state, _X, _Y)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(target))


@pytest.mark.parametrize("step", [with_target, with_average])
def test_a_network_may_be_passed_for_another(step):
    """As when a target network is brought up to date: its arrays are those of state that the step takes."""
    batch = (_X, _Y) if step is with_target else ({"x": _X, "y": _Y},)
    sharded, plain = deepcompile.shard(step), jax.jit(step)
    mine, theirs = jax.tree.map(jnp.copy, ((_PARAMS, _OTHER, _STATE),) * 2)
    for count in range(4):
        found, expected = sharded(*mine, *batch), plain(*theirs, *batch)
        assert_close(found, expected, 1e-5, f"step {count}")
        mine, theirs = (
            (out[0], out[0] if count % 2 else (args if step is with_target else out)[1], out[-2])
            for out, args in ((found, mine), (expected, theirs))
        )


class Graph(NamedTuple):
    nodes: jax.Array
    edges: jax.Array
    senders: jax.Array


def _read(params, opt_state, first, second):
    total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves((first, second)))
    return _updated(params, opt_state, lambda p: total * _loss(p, _X, _Y))


@pytest.mark.parametrize(
    ("first", "second", "roles"),
    [
        (
            Graph(np.ones((16, 4)), np.ones((32, 4)), np.ones(32, np.int32)),
            np.ones(8),
            "batch: first; replicated: second",
        ),
        ({"x": np.ones((16, 4))}, {"rows": np.ones(16), "table": np.ones(3)}, "batch: first; replicated: second"),
        ({"rows": np.ones(8), "table": np.ones(16)}, np.ones((16, 4)), "batch: second; replicated: first"),
        ({"x": {"y": np.ones((16, 4))}}, np.ones(16), "batch: first, second"),
        ((np.ones(8), np.ones(16)), np.ones((16, 4)), "batch: second; replicated: first"),
        (np.ones(16), _model(4), "read only: second; batch: first"),
        (np.ones(8), np.ones((16, 4)), "batch: second; replicated: first"),
    ],
    ids=["graph", "behind", "in front", "nested", "tuple", "model behind", "one array"],
)
def test_what_batches_look_like(first, second, roles):
    sharded = deepcompile.shard(_read)
    sharded.trace(_PARAMS, _STATE, first, second)
    assert arguments_of(sharded) == f"state: params, opt_state; {roles}"


def _rotated(params, opt_state, x, cos, sin):
    turned = x * cos[: len(x[0])] + jnp.roll(x, 1, -1) * sin[: len(x[0])]
    return _updated(params, opt_state, lambda p: jnp.mean(_apply(p, turned) ** 2))


def _diffused(params, opt_state, betas, alphas, x, key):
    at = jax.random.randint(key, (len(x),), 0, len(betas))
    noised = x * alphas[at, None] + betas[at, None] * jax.random.normal(key, x.shape)
    return _updated(params, opt_state, lambda p: jnp.mean(_apply(p, noised) ** 2))


def _mined(params, opt_state, near, far, x):
    if len(x) != 16:
        raise ValueError("sixteen examples")
    return _updated(params, opt_state, lambda p: jnp.mean(_apply(p, x) ** 2) + near.mean() + far.mean())


_TABLE, _BETAS = np.ones((24, 32), np.float32), np.linspace(1e-4, 0.02, 1001)


@pytest.mark.parametrize(
    ("step", "others", "roles"),
    [
        (_rotated, (np.ones((16, 8, 32)), _TABLE, _TABLE), "batch: x; replicated: cos, sin"),
        (_diffused, (_BETAS, _BETAS, _X, jax.random.key(0)), "batch: x; replicated: betas, alphas, key"),
        (_mined, (_BETAS[:24], _BETAS[:24], np.ones((16, 32))), "batch: near, far; replicated: x"),
    ],
    ids=["tables behind", "tables in front", "a step for as many examples alone"],
)
def test_the_batch_is_what_the_work_grows_with(step, others, roles):
    sharded = deepcompile.shard(step)
    sharded.trace(_PARAMS, _STATE, *others)
    assert arguments_of(sharded) == f"state: params, opt_state; {roles}"


_KEY = jax.random.PRNGKey(0)


@pytest.mark.parametrize(
    "keys",
    [{"dropout": _KEY, "noise": _KEY}, jax.random.split(_KEY, 8), jax.random.split(jax.random.key(0), 8)],
    ids=["one of each name", "several", "several of a type"],
)
def test_random_keys_are_no_batch(keys):
    sharded = deepcompile.shard(lambda params, opt_state, keys, x, y: _updated(params, opt_state, _loss, x, y))
    sharded.trace(_PARAMS, _STATE, keys, _X, _Y)
    assert arguments_of(sharded) == "state: params, opt_state; batch: x, y; replicated: keys"


def test_a_raw_key_beside_examples_is_none_of_them():
    def step(params, batch):
        noise = jax.random.normal(batch["key"], batch["x"].shape)
        return params - jax.grad(lambda params: jnp.mean((batch["x"] + noise) @ params))(params)

    params, batch = jnp.ones((4, 8)), {"x": np.ones((16, 4), np.float32), "key": _KEY}
    sharded = deepcompile.shard(step)
    assert_close(sharded(jnp.copy(params), batch), jax.jit(step)(params, batch), 1e-5, "result")
    assert arguments_of(sharded) == "state: params; batch: batch"


def test_examples_by_name():
    sharded = deepcompile.shard(with_keywords)
    found = sharded(*jax.tree.map(jnp.copy, (_PARAMS, _STATE)), x=_X, y=_Y)
    assert_close(found, jax.jit(with_keywords)(_PARAMS, _STATE, x=_X, y=_Y), 1e-5, "result")
    assert arguments_of(sharded) == "state: params, opt_state; batch: x, y"


def test_state_of_which_nothing_is_kept_is_returned_before_another_result_of_its_shape():
    def nearest_means(centres, x):
        nearest = jnp.abs(x[:, None] - centres).argmin(1)
        return jax.ops.segment_sum(x, nearest, 16) / jnp.maximum(jnp.bincount(nearest, length=16), 1), nearest

    x, centres = np.arange(16, dtype=np.float32), np.arange(16, dtype=np.float32) + 0.3
    found = deepcompile.shard(nearest_means)(jnp.asarray(centres), x)
    assert_close(found, jax.jit(nearest_means)(centres, x), 1e-6, "result")


def test_gradients_are_no_new_parameters():
    """What is computed outside from the parameters and their gradients needs both."""

    def gradients(params, x, y):
        loss, grads = jax.value_and_grad(lambda p: _loss(p, x, y) + sum(map(jnp.vdot, *map(jax.tree.leaves, (p, p)))))(
            params
        )
        return loss, grads

    sharded = deepcompile.shard(gradients)
    params = jax.device_put(_PARAMS, sharded.mesh.devices.flat[0])
    for _ in range(3):
        _, grads = sharded(params, _X, _Y)
        params = jax.tree.map(
            lambda p, g: p - 0.1 * g, jax.device_put(params, jax.tree.map(lambda g: g.sharding, grads)), grads
        )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_microbatches_need_a_batch():
    sharded = deepcompile.shard(key_in_front, microbatches=2)
    with pytest.raises(deepcompile.errors.NoBatchError, match="key_in_front was to work through its batch in 2 parts"):
        sharded.trace(jax.random.key(0), _LAYERS)


def test_positions_must_be_there():
    for named in ({"state_argnums": 5}, {"batch_argnums": (1, 4)}):
        with pytest.raises(deepcompile.errors.ArgnumsError):
            deepcompile.shard(with_teacher, **named).trace(_PARAMS, _STATE, _OTHER, _X)


def test_parameters_that_are_not_returned_are_missed():
    def forgetful(params, opt_state, x, y):
        return with_target(params, _OTHER, opt_state, x, y)[1:]

    with pytest.raises(deepcompile.errors.StateNotReturnedError, match="argument params"):
        deepcompile.shard(forgetful).trace(_PARAMS, _STATE, _X, _Y)


def test_an_optimizer_that_is_not_returned_is_missed():
    def forgetful(params, opt_state, x, y):
        new, _, loss = with_target(params, _OTHER, opt_state, x, y)
        return new, loss

    with pytest.raises(deepcompile.errors.StateNotReturnedError, match="argument opt_state"):
        deepcompile.shard(forgetful).trace(_PARAMS, _STATE, _X, _Y)


def test_a_network_returned_changed_is_not_taken_for_one_that_is_only_read():
    def promoting(params, opt_state, x, y):
        new, opt_state, loss = with_target(params, _OTHER, opt_state, x, y)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), new), opt_state, loss

    with pytest.raises(deepcompile.errors.StateChangedError, match=r"was float32.* and is bfloat16"):
        deepcompile.shard(promoting).trace(_PARAMS, _STATE, _X, _Y)


def test_named_positions_leave_nothing_to_guess():
    sharded = deepcompile.shard(with_average, state_argnums=(0, 2))
    sharded.trace(_PARAMS, _OTHER, _STATE, {"x": _X, "y": _Y})
    assert arguments_of(sharded) == "state: params, opt_state; batch: batch; replicated: average"
    sharded = deepcompile.shard(with_average, batch_argnums=3)
    sharded.trace(_PARAMS, _OTHER, _STATE, {"x": _X, "y": _Y})
    assert arguments_of(sharded) == "state: params, average, opt_state; batch: batch"
