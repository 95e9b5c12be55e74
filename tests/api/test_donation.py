"""What is donated: a state whose moments are kept by hand too, and never that of which gradients are returned."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import pytest

import jax_deepcompile as deepcompile
from tests.equality.harness import assert_close

pytestmark = pytest.mark.cpu_mesh

X, Y = jnp.linspace(-1, 1, 16 * 32).reshape(16, 32), jnp.linspace(1, -1, 16 * 16).reshape(16, 16)


def model() -> dict:
    keys = jax.random.split(jax.random.key(0))
    return {
        "first": {"kernel": jax.random.normal(keys[0], (32, 64)) / 8, "bias": jnp.zeros(64)},
        "second": {"kernel": jax.random.normal(keys[1], (64, 16)) / 8, "bias": jnp.zeros(16)},
    }


def zeros() -> dict:
    return jax.tree.map(jnp.zeros_like, model())


def loss_of(params, x, y):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((x - y) ** 2)


def averaged(decay: float, old, new):
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)


def adam(p, m, v, x, y, decay=0.0, coupled=0.0):
    loss, grads = jax.value_and_grad(loss_of)(p, x, y)
    grads = jax.tree.map(lambda g, p: g + coupled * p, grads, p) if coupled else grads
    m, v = averaged(0.9, m, grads), averaged(0.99, v, jax.tree.map(jnp.square, grads))
    p = jax.tree.map(lambda p, m, v: p - 1e-2 * (m / (jnp.sqrt(v) + 1e-8) + decay * p), p, m, v)
    return p, m, v, loss


def momentum(p, m, x, y):
    loss, grads = jax.value_and_grad(loss_of)(p, x, y)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m, loss


def descent(p, x, y):
    loss, grads = jax.value_and_grad(loss_of)(p, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss


class Tuple(NamedTuple):
    p: Any
    m: Any
    v: Any


@flax.struct.dataclass
class Data:
    p: Any
    m: Any
    v: Any


def adam_in_dict(state, x, y):
    p, m, v, loss = adam(state["p"], state["m"], state["v"], x, y)
    return {"p": p, "m": m, "v": v}, loss


def adam_in_tuple(state, x, y):
    p, m, v, loss = adam(*state, x, y, decay=0.1)
    return (p, m, v), loss


def adam_in(kind, state, x, y):
    p, m, v, loss = adam(state.p, state.m, state.v, x, y, coupled=0.1)
    return loss, kind(p, m, v)


def adam_in_half_precision(state, x, y):
    p, m, v, loss = adam(state["p"], *jax.tree.map(jnp.float32, (state["m"], state["v"])), x, y)
    m, v = jax.tree.map(jnp.bfloat16, (m, v))
    return {"p": p, "m": m, "v": v}, loss


def clipped_momentum(state, x, y):
    """By the norm of all gradients, and only where they are finite."""
    loss, grads = jax.value_and_grad(loss_of)(state["p"], x, y)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    m = jax.tree.map(lambda m, g: jnp.where(jnp.isfinite(norm), 0.9 * m + g / norm, m), state["m"], grads)
    return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], m), "m": m}, {"loss": loss, "norm": norm}


def with_average(state, x, y):
    p, loss = descent(state["p"], x, y)
    return {"p": p, "average": averaged(0.99, state["average"], p)}, loss


def stacked_layers(state, x, y):
    def loss_of(p):
        return jnp.mean((jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0][:, :16] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["p"])
    p, m = jax.lax.scan(
        lambda _, layer: (None, (layer[0] - 0.1 * layer[1], 0.9 * layer[1] + layer[2])),
        None,
        (state["p"], state["m"], grads),
    )[1]
    return {"p": p, "m": m}, loss


HALF = jax.tree.map(jnp.bfloat16, zeros())
STACKED = {"p": jnp.ones((3, 32, 32)) / 32, "m": jnp.zeros((3, 32, 32))}
DONATED = {
    "dict": (adam_in_dict, {"p": model(), "m": zeros(), "v": zeros()}),
    "tuple": (adam_in_tuple, (model(), zeros(), zeros())),
    "named tuple": (functools.partial(adam_in, Tuple), Tuple(model(), zeros(), zeros())),
    "dataclass": (functools.partial(adam_in, Data), Data(model(), zeros(), zeros())),
    "half precision": (adam_in_half_precision, {"p": model(), "m": HALF, "v": HALF}),
    "momentum": (clipped_momentum, {"p": model(), "m": zeros()}),
    "average": (with_average, {"p": model(), "average": model()}),
    "stacked": (stacked_layers, STACKED),
}


def is_donated(arg) -> bool:
    """Whether a call deleted ``arg``, which was where it is wanted: all of it or nothing."""
    gone = {leaf.is_deleted() for leaf in jax.tree.leaves(arg)}
    assert len(gone) == 1
    return gone.pop()


@pytest.mark.parametrize("name", DONATED)
def test_a_state_with_moments_kept_by_hand_is_donated(name: str):
    step, given = DONATED[name]
    sharded = deepcompile.shard(step)
    mine, theirs = sharded.init(lambda: given), given
    for _ in range(2):
        before = mine
        found, expected = sharded(before, X, Y), jax.jit(step)(theirs, X, Y)
        assert_close(found, expected, 2e-2 if name == "half precision" else 1e-4, name)
        mine, theirs = (out[1] if name in ("named tuple", "dataclass") else out[0] for out in (found, expected))
        assert is_donated(before)
    told = sharded.explain()
    parameters = given["p"] if isinstance(given, dict) else given[0] if isinstance(given, tuple) else given.p
    assert told.headline.parameters == sum(leaf.size for leaf in jax.tree.leaves(parameters))
    line = told.division.arguments[0].line()
    assert line.startswith("  state: state, donated: the first argument that may be state; returned anew: ")
    assert "elementwise arithmetic alone touches" in line


def test_its_memory_is_taken_once():
    step, given = DONATED["dict"]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(given)) // 8
    for donate in (True, False):
        traced = deepcompile.shard(step, donate=donate).trace(given, X, Y)
        assert traced.lower().compile().memory_analysis().alias_size_in_bytes == (size if donate else 0)
        assert (", not donated: the first argument that may be state; donate=False" in traced.explain()) != donate


@pytest.mark.parametrize(("step", "count"), [(adam, 3), (momentum, 2)])
def test_moments_may_be_arguments_of_their_own(step, count: int):
    sharded = deepcompile.shard(lambda *args: step(*args))
    state = sharded.init(lambda: (model(), *[zeros()] * (count - 1)))
    expected = jax.jit(step)(*jax.tree.map(jnp.copy, state), X, Y)
    assert_close(sharded(*state, X, Y), expected, 1e-4, "result")
    assert all(is_donated(each) for each in state)


@pytest.mark.parametrize(
    ("argnums", "told"),
    [
        (0, "donated: named in state_argnums; returned anew"),
        (
            None,
            "not donated: the first argument that may be state; what is returned may be its gradients; "
            "state_argnums=0 says that it is the next state",
        ),
    ],
)
def test_plain_descent_is_donated_if_the_user_says_so(argnums, told: str):
    sharded = deepcompile.shard(descent, state_argnums=argnums)
    params = sharded.init(model)
    sharded(params, X, Y)
    assert is_donated(params) == (argnums == 0)
    assert sharded.explain().division.arguments[0].line() == f"  p: state, {told}"


def gradients_beside_parameters(p, x, y):
    return p, *jax.value_and_grad(loss_of)(p, x, y)


def gradients_beside_a_state(state, x, y):
    return state, *jax.value_and_grad(loss_of)(state["p"], x, y)


def evaluation(state, x, y):
    return state, loss_of(state["p"], x, y)


def gradients_with_a_penalty(p, x, y):
    return jax.value_and_grad(lambda p: loss_of(p, x, y) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)))(p)


def distance(p, q):
    return sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(q), strict=True))


def gradients_of_a_distance(both, x, y):
    return jax.value_and_grad(lambda both: loss_of(both["p"], x, y) + distance(both["p"], both["q"]))(both)


def scaled(p, x, y):
    return jax.tree.map(lambda leaf: leaf * jnp.mean(x**2), p), jnp.mean(y**2)


FULL = {"p": model(), "m": zeros(), "v": zeros(), "count": jnp.int32(0)}


@pytest.mark.parametrize(
    ("step", "given"),
    [
        (gradients_beside_parameters, model()),
        (gradients_beside_a_state, FULL),
        (evaluation, FULL),
        (gradients_with_a_penalty, model()),
        (gradients_of_a_distance, {"p": model(), "q": zeros()}),
        (scaled, model()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_may_be_needed_again_is_not_donated(step, given):
    sharded = deepcompile.shard(step)
    arg = sharded.init(lambda: given)
    for _ in range(2):
        assert_close(sharded(arg, X, Y), jax.jit(step)(given, X, Y), 1e-4, "result")
    assert not is_donated(arg)
    assert "state, not donated: " in sharded.explain().division.arguments[0].line()


def test_an_average_that_gradients_carry_is_donated_and_the_parameters_are_not():
    """Gradients keep the parameters near their average; whoever called updates the parameters with both."""

    def step(p, average, x, y):
        grads = jax.grad(lambda p: loss_of(p, x, y) + distance(p, average))(p)
        return grads, averaged(0.9, average, p)

    sharded = deepcompile.shard(step)
    p, average = sharded.init(lambda: (model(), zeros()))
    sharded(p, average, X, Y)
    assert (is_donated(p), is_donated(average)) == (False, True)


def test_every_argument_has_a_role_and_a_reason():
    def step(state, key, rate, teacher, x, y, *, scale):
        p, loss = descent(state["p"], x + rate * jax.random.normal(key, x.shape), y)
        return {**state, "p": p, "count": state["count"] + 1}, scale * loss + loss_of(teacher, x, y)

    state = {"p": model(), "count": jnp.int32(0)}
    told = deepcompile.shard(step).trace(state, jax.random.key(0), 0.1, model(), X, Y, scale=2.0).explain()
    assert [each.line() for each in told.division.arguments][:7] == [
        "  state: state, donated: the first argument that may be state; returned anew: state['count'] is int32, "
        "as no gradient is",
        "  key: replicated: a random key",
        "  rate: replicated: a number",
        "  teacher: read only: like the parameters of a model",
        "  x: batch: 16 examples",
        "  y: batch: 16 examples",
        "  scale: replicated: a number",
    ]
