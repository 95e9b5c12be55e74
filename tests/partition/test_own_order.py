"""Rows that are sorted among all examples are sorted by each device, where nothing can tell."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

import jax_deepcompile as deepcompile
from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.frontend.canonicalize.broadcasts_in_loops import with_broadcasts_inside
from jax_deepcompile.ir.traversal import equations, inline_calls
from jax_deepcompile.partition.own_order import with_own_order
from tests.equality.harness import assert_close

pytestmark = pytest.mark.pure

D, F = 4, 3


def weights(experts: int) -> dict[str, jax.Array]:
    shapes = {"router": (D, experts), "up": (experts, D, F), "down": (experts, F, D), "bias": (experts, F)}
    return {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}


def argsorted(rows, order, k):
    return rows[jnp.argsort(order)].reshape(-1, k, rows.shape[-1])


@jax.custom_vjp
def permuted(rows, order):
    return rows[order]


permuted.defvjp(lambda rows, order: (rows[order], order), lambda order, g: (g[jnp.argsort(order)], None))


def put_back_by_a_permutation(rows, order, k):
    """As MaxText writes it, whose gradient is no scatter."""
    return permuted(rows, jnp.argsort(order)).reshape(-1, k, rows.shape[-1])


def added(rows, order, k):
    return jnp.zeros((rows.shape[0] // k, rows.shape[-1]), rows.dtype).at[order // k].add(rows)[:, None]


def summed(rows, order, k):
    return jax.ops.segment_sum(rows, order // k, rows.shape[0] // k)[:, None]


def ones(ids, experts):
    return jnp.sum(jax.nn.one_hot(ids, experts, dtype=jnp.int32), 0)


def bins(ids, experts):
    return jnp.bincount(ids, length=experts)


def layer(w, x, k=2, put_back=argsorted, count=bins, bias=False):
    """Tokens that meet ``k`` experts each, as they are written without dropping any."""
    experts = w["router"].shape[1]
    tokens = x.reshape(-1, D)
    chances, chosen = lax.top_k(jax.nn.softmax(tokens @ w["router"]), k)
    ids = chosen.reshape(-1)
    order = jnp.argsort(ids)
    sizes = count(ids, experts)
    hidden = lax.ragged_dot(tokens[order // k], w["up"], sizes)
    if bias:
        hidden += w["bias"][ids[order]]
    rows = lax.ragged_dot(jnp.tanh(hidden), w["down"], sizes) * chances.reshape(-1)[order][:, None]
    balance = jnp.sum(sizes / sizes.sum() * jax.nn.softmax(tokens @ w["router"]).mean(0))
    return put_back(rows, order, k).sum(1).reshape(x.shape), balance


def gradients(function):
    def loss(*args):
        y, balance = function(*args)
        return jnp.sum(y**2) + balance

    return jax.value_and_grad(loss, (0, 1))


def flat(function, *args) -> jex.ClosedJaxpr:
    return with_broadcasts_inside(inline_calls(jax.make_jaxpr(function)(*args)))


def sorted_shapes(closed) -> set[tuple[int, ...]]:
    return {eqn.invars[0].aval.shape for eqn in equations(closed) if eqn.primitive.name == "sort"}


def assert_own(function, *args, parts: int) -> jex.ClosedJaxpr:
    """The rewritten jaxpr, in which every part sorts its own rows, and computes the same."""
    before = flat(function, *args)
    after = with_own_order(before, parts)
    ((rows,),) = sorted_shapes(before)
    jex.check_jaxpr(open_jaxpr(after))
    assert sorted_shapes(after) == {(parts, rows // parts)}
    made = jax.jit(jex.jaxpr_as_fun(after))(*jax.tree.leaves(args))
    for left, right in zip(made, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-4, atol=2e-5)
    return after


def tokens(count: int, seed: int = 9) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count // 2, 2, D))


@pytest.mark.parametrize(
    ("parts", "experts", "k", "put_back", "count", "bias"),
    [
        (2, 3, 1, argsorted, bins, False),
        (4, 5, 2, argsorted, ones, True),
        (3, 4, 3, added, bins, True),
        (2, 4, 2, put_back_by_a_permutation, bins, False),
        (2, 6, 2, summed, ones, False),
    ],
)
def test_ways_to_write_a_layer(parts, experts, k, put_back, count, bias):
    def written(w, x):
        return layer(w, x, k, put_back, count, bias)

    assert_own(gradients(written), weights(experts), tokens(4 * parts), parts=parts)


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint], ids=["", "checkpoint"])
def test_in_a_loop_over_layers(wrap):
    w, x = jax.tree.map(lambda each: jnp.stack([each, each / 2]), weights(4)), tokens(8)

    def looped(w, x):
        def body(x, w):
            y, balance = layer(w, x)
            return x + y, balance

        y, balance = lax.scan(wrap(body), x, w)
        return y, balance.sum()

    if wrap is jax.checkpoint:
        assert_own(gradients(looped), w, x, parts=2)
    assert_own(looped, w, x, parts=2)


def test_tokens_that_no_expert_has():
    ids = jnp.asarray([4, 0, 3, 4, 1, 1, 7, 0])

    def padded(w, x):
        keys = ids + (x[:, 0, 0] > 99).astype(int).repeat(2)
        order = jnp.argsort(keys)
        rows = lax.ragged_dot(x.reshape(-1, D)[order], w["up"], jnp.bincount(keys, length=4))
        return jnp.zeros_like(rows).at[order].set(rows)

    assert_own(padded, weights(4), tokens(8), parts=4)


def chosen_of(w, x):
    ids = jnp.argmax(x.reshape(-1, D) @ w["router"], 1)
    return ids, jnp.argsort(ids), jnp.bincount(ids, length=w["router"].shape[1])


def multiplied(w, x, order, sizes):
    return lax.ragged_dot(x.reshape(-1, D)[order], w["up"], sizes)


def with_capacity(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes)[:6].sum()


def with_sizes_cut(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, jnp.minimum(sizes, 3)).sum()


def with_other_sizes(w, x):
    ids, order, _ = chosen_of(w, x)
    return multiplied(w, x, order, jnp.bincount((ids + 1) % 4, length=4)).sum()


def with_dropout(w, x):
    _, order, sizes = chosen_of(w, x)
    rows = multiplied(w, x, order, sizes)
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, rows.shape), rows, 0).sum()


def added_up(w, x):
    _, order, sizes = chosen_of(w, x)
    return jnp.cumsum(multiplied(w, x, order, sizes), 0).max()


def in_pairs(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes).reshape(-1, 2, F).max(1).sum()


def returned(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes)


def put_elsewhere(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes)[jnp.argsort(order)[::-1]]


def places_within_experts(w, x):
    ids, order, sizes = chosen_of(w, x)
    return jnp.argsort(order) - (jnp.cumsum(sizes) - sizes)[ids]


def cut_off_by_place(w, x):
    _, order, _ = chosen_of(w, x)
    places = jnp.argsort(order)
    kept = jnp.zeros((4, D)).at[places].set(x.reshape(-1, D), mode="drop")
    return kept.at[places].get(mode="fill", fill_value=0).sum()


def with_a_row_for_the_rest(w, x):
    _, order, _ = chosen_of(w, x)
    return jnp.zeros((9, D)).at[jnp.argsort(order)].set(x.reshape(-1, D)).max()


def put_by_sorted_places(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes)[jnp.sort(jnp.argsort(order))]


def put_by_places_and_order(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes)[jnp.maximum(jnp.argsort(order), order)]


def put_by_places_from_the_first(w, x):
    _, order, sizes = chosen_of(w, x)
    places = jnp.argsort(order)
    return multiplied(w, x, order, sizes)[places - places[0]]


def with_one_size_cut(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes.at[2].set(jnp.minimum(sizes[2], 7))).sum()


def with_one_key_moved(w, x):
    keys = (9 * x.reshape(-1, D)[:, 0]).astype(int)
    sizes = jnp.bincount(jnp.where(keys == 999, 0, keys), length=4)
    return multiplied(w, x, jnp.argsort(keys), sizes).sum()


def with_rounded_keys(w, x):
    values = jnp.abs(x.reshape(-1, D)[:, 0])
    return multiplied(
        w, x, jnp.argsort(values.astype(int)), jnp.bincount(jnp.round(values).astype(int), length=4)
    ).sum()


def with_keys_that_are_values(w, x):
    keys = lax.top_k((9 * x.reshape(-1, D)).astype(int), 1)[0][:, 0]
    return multiplied(w, x, jnp.argsort(keys), jax.nn.one_hot(keys, 4, dtype=jnp.int32).sum(0)).sum()


def with_small_counts(w, x):
    ids, order, _ = chosen_of(w, jnp.tile(x, (32, 1, 1)))
    sizes = jax.nn.one_hot(ids, 4, dtype=jnp.int8).sum(0, dtype=jnp.int8)
    return multiplied(w, jnp.tile(x, (32, 1, 1)), order, sizes).sum()


def sorted_as_columns(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes)[jnp.argsort(order[:, None], 0)[:, 0]]


def sorted_by_a_comparison(w, x):
    _, order, sizes = chosen_of(w, x)
    return multiplied(w, x, order, sizes)[jnp.argsort(order > 3)]


@pytest.mark.parametrize(
    "function",
    [
        cut_off_by_place,
        with_a_row_for_the_rest,
        put_by_sorted_places,
        put_by_places_and_order,
        put_by_places_from_the_first,
        with_one_size_cut,
        with_one_key_moved,
        with_rounded_keys,
        with_keys_that_are_values,
        with_small_counts,
        sorted_as_columns,
        sorted_by_a_comparison,
        with_capacity,
        with_sizes_cut,
        with_other_sizes,
        with_dropout,
        added_up,
        in_pairs,
        returned,
        put_elsewhere,
        places_within_experts,
    ],
)
def test_left_alone_where_the_order_of_all_matters(function):
    closed = flat(function, weights(4), tokens(8))
    assert with_own_order(closed, 2) is closed


def test_left_alone_where_rows_cannot_be_divided():
    closed = flat(layer, weights(4), tokens(8))
    assert with_own_order(closed, 3) is closed


@pytest.mark.cpu_mesh
@pytest.mark.parametrize(("mesh", "microbatches"), [({"fsdp": 8}, 1), ({"data": 2, "fsdp": 2}, 2)])
def test_in_a_step(mesh, microbatches):
    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.sum(layer(w, x, bias=True)[0] ** 2))(w)
        return jax.tree.map(lambda w, g: w - 0.001 * g, w, grads), loss

    w, x = weights(8), tokens(1024)
    sharded = deepcompile.shard(step, mesh, microbatches=microbatches, donate=False)
    assert "activations moved between devices: none" in str(sharded.trace(w, x).explain())
    assert_close(sharded(w, x), jax.jit(step)(w, x), 1e-4, "state")
