"""Ragged products are computed as products of tiles, and are the same."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.ir import ragged
from jax_deepcompile.ir.ragged import RaggedProduct
from jax_deepcompile.ir.traversal import equations, inline_calls
from jax_deepcompile.lowering import ragged_products
from jax_deepcompile.lowering.ragged_products import with_tiles
from tests.cases import examples
from tests.partition.rules.test_kernels import ragged_products as products

pytestmark = pytest.mark.pure


@contextlib.contextmanager
def small_tiles():
    """Tiles of few rows, and few of them at a time, also where they do not pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedProduct, "pays_in_tiles", True)
        patch.setattr(ragged, "_FEW_ROWS", 2)
        patch.setattr(ragged, "_TILE_COSTS_ROWS", 4)
        patch.setattr(ragged_products, "_BYTES_AT_ONCE", 100)
        yield


def sizes_of(groups: int, rows: int, seed: int) -> np.ndarray:
    """Of groups of very different sizes, which have most of the rows."""
    return (
        np.random.default_rng(seed).multinomial(rows - 7, np.arange(groups) / np.arange(groups).sum()).astype(np.int32)
    )


def traced(function, *args):
    return inline_calls(jax.make_jaxpr(function)(*args))


def names(closed) -> list[str]:
    return [eqn.primitive.name for eqn in equations(closed)]


def experts(x, w, sizes):
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, w, sizes)), jnp.swapaxes(w, 1, 2), sizes)


@examples(60)
@given(products())
def test_any_product_is_the_same(product):
    numbers, x, y, sizes = product

    def multiplied(*args):
        return lax.ragged_dot_general(*args, ragged_dot_dimension_numbers=numbers)

    with small_tiles():
        changed = with_tiles(jax.make_jaxpr(multiplied)(x, y, sizes))
    made = {eqn.primitive.name for eqn in equations(changed)}
    (old,) = jax.make_jaxpr(multiplied)(x, y, sizes).eqns
    assert ("ragged_dot_general" in made) == (RaggedProduct.of(old) is None)
    np.testing.assert_array_equal(eval_local(changed, [x, y, sizes])[0], multiplied(x, y, sizes))


def test_products_and_gradients_of_a_layer():
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(1024, 32), (16, 32, 8)]))
    sizes = sizes_of(16, 1024, 0)

    def gradients(x, w, sizes):
        return jax.grad(lambda x, w: jnp.sum(experts(x, w, sizes) ** 2), (0, 1))(x, w)

    before = traced(gradients, x, w, sizes)
    after = with_tiles(before)
    assert names(before).count("ragged_dot_general") == 6
    assert "ragged_dot_general" not in names(after)
    (tiles,) = {eqn.invars[0].aval.shape[0] for eqn in equations(after) if eqn.primitive.name == "dot_general"}
    assert tiles == RaggedProduct.of(find(before)).tiles
    for made, expected in zip(eval_local(after, [x, w, sizes]), gradients(x, w, sizes), strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-3)


def find(closed):
    return next(eqn for eqn in equations(closed) if eqn.primitive.name == "ragged_dot_general")


@pytest.mark.parametrize("wrap", ["scan", "cond", "checkpoint"])
def test_inside_of(wrap):
    x, w, sizes = jnp.ones((1024, 8)), jnp.ones((16, 8, 8)), sizes_of(16, 1024, 1)

    def looped(x, w, sizes):
        if wrap == "scan":
            return lax.scan(lambda x, _: (lax.ragged_dot(x, w, sizes), None), x, None, length=2)[0]
        if wrap == "cond":
            return lax.cond(x.sum() > 0, lambda: lax.ragged_dot(x, w, sizes), lambda: x)
        return jax.checkpoint(lax.ragged_dot)(x, w, sizes)

    after = with_tiles(traced(looped, x, w, sizes))
    assert "ragged_dot_general" not in names(after)
    np.testing.assert_allclose(eval_local(after, [x, w, sizes])[0], looped(x, w, sizes), rtol=1e-5)


def test_a_number_that_is_none_stays_with_its_group():
    x, w, sizes = jnp.ones((1024, 4)), jnp.ones((8, 4, 4)).at[3].set(jnp.nan), np.full(8, 120, np.int32)
    made = eval_local(with_tiles(traced(lax.ragged_dot, x, w, sizes)), [x, w, sizes])[0]
    expected = np.ones((1024, 1)) * 4.0
    expected[360:480] = np.nan
    expected[960:] = 0
    np.testing.assert_array_equal(made, np.broadcast_to(expected, (1024, 4)))


def test_sums_of_tiles_are_rounded_once():
    x, y = (jax.random.normal(jax.random.key(i), (2048, 8), jnp.bfloat16) for i in range(2))
    sizes = np.full(8, 256, np.int32)
    numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])

    def summed(x, y, sizes):
        return lax.ragged_dot_general(x, y, sizes, numbers)

    after = with_tiles(traced(summed, x, y, sizes))
    assert "ragged_dot_general" not in names(after)
    exact = jnp.einsum("gbk,gbn->gkn", *(each.astype(jnp.float32).reshape(8, 256, 8) for each in (x, y)))
    np.testing.assert_array_equal(eval_local(after, [x, y, sizes])[0], exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("rows", "groups"), [(8, 8), (64, 2), (4096, 1)], ids=["a row for each", "few rows", "one group"]
)
def test_left_alone_where_all_groups_are_less_work(rows, groups):
    closed = traced(
        lax.ragged_dot, jnp.ones((rows, 4)), jnp.ones((groups, 4, 4)), sizes_of(groups + 1, rows + 7, 0)[1:]
    )
    assert with_tiles(closed) is closed


def test_left_alone_are_products_of_a_batch():
    args = jnp.ones((2, 1024, 4)), jnp.ones((2, 16, 4, 4)), np.stack([sizes_of(16, 1024, i) for i in range(2)])
    closed = traced(jax.vmap(lax.ragged_dot), *args)
    assert with_tiles(closed) is closed
