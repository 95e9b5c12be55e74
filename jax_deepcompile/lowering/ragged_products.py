"""Ragged matrix products, of which JAX has XLA multiply every row with the matrices of all groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import provenance
from jax_deepcompile.ir.ragged import RaggedProduct
from jax_deepcompile.ir.rewrite import Walk, abstract, inlined

_BYTES_AT_ONCE = 512 << 20
"""Of the matrices of those tiles that are computed together."""


def with_tiles(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with ragged products as products of tiles, where that is less work, in loops and branches too.

    A tile is some rows of one group, filled up with zeros. As many are computed as any sizes of groups can need.
    Results are the same, but for the order of sums over rows. Before and after::

        y = ragged_dot_general x:bf16[16384,4096] w:bf16[8,4096,14336] sizes:i32[8]
        y = rows of (dot_general x[rows of tiles]:bf16[29,768,4096] w[groups of tiles]:bf16[29,4096,14336])
    """
    walk = Walk(closed, with_tiles)
    for eqn in walk:
        product = RaggedProduct.of(eqn) if eqn.primitive.name == "ragged_dot_general" else None
        walk.eqns += _tiled(eqn, product) if product is not None and product.pays_in_tiles else [eqn]
    return walk.result()


def _tiled(eqn: Any, product: RaggedProduct) -> list:
    (result,), dtype = (var.aval for var in eqn.outvars), eqn.outvars[0].aval.dtype
    if product.sums_rows and jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, jnp.float32)  # sums of tiles are rounded once, as those of rows are
    dot = partial(lax.dot_general, precision=eqn.params["precision"], preferred_element_type=dtype)

    def compute(x: jax.Array, y: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        rows_of_x, rows_of_y = _with_rows(x, product.x_rows), _with_rows(y, product.y_rows)
        if product.sums_rows:
            made = _sums(product, sizes, rows_of_x, rows_of_y, dot, dtype)
        else:
            contracted, _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
            after = [_after(*each) for each in zip(contracted, (product.x_rows, product.y_rows), strict=True)]
            made = _rows(product, sizes, rows_of_x, rows_of_y, after, dot)
        return [lax.reshape(made.astype(result.dtype), result.shape)]

    with provenance(eqn):
        return inlined(jax.make_jaxpr(compute)(*map(abstract, eqn.invars)), eqn.invars, eqn.outvars)


def _with_rows(array: jax.Array, rows: Sequence[int]) -> jax.Array:
    """[rows, ...]: these dimensions put together, before the others."""
    others = [dim for dim in range(array.ndim) if dim not in rows]
    shape = math.prod(array.shape[dim] for dim in rows), *(array.shape[dim] for dim in others)
    return lax.reshape(lax.transpose(array, (*rows, *others)), shape)


def _after(dims: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Where dimensions that are no rows are in what ``_with_rows`` makes."""
    return [1 + dim - sum(row < dim for row in rows) for dim in dims]


class _Tiles(NamedTuple):
    """Which rows each tile has.

    Attributes:
      groups: whose they are, [tiles].
      rows: [tiles, tile_rows].
      are_theirs: whether a tile has this row; if not, it has zeros there.
    """

    groups: jax.Array
    rows: jax.Array
    are_theirs: jax.Array

    def of(self, values: jax.Array) -> jax.Array:
        """[tiles, tile_rows, ...] of [rows, ...]."""
        found = values.at[self.rows].get(mode="clip")
        return jnp.where(lax.expand_dims(self.are_theirs, range(2, found.ndim)), found, jnp.zeros_like(found))


class _Runs(NamedTuple):
    """Rows of one group, one after the other.

    Attributes:
      starts, ends: their rows, [runs].
      first_tiles, last_tiles: those that have them; the last one is the next run's first.
    """

    starts: jax.Array
    ends: jax.Array
    first_tiles: jax.Array
    last_tiles: jax.Array

    @classmethod
    def of(cls, product: RaggedProduct, sizes: jax.Array) -> _Runs:
        length = product.rows // product.outer
        counted = sizes.astype(jnp.int32).reshape(-1, product.groups) * product.between
        within = jnp.minimum(jnp.cumsum(jnp.broadcast_to(counted, (product.outer, product.groups)), axis=1), length)
        ends = (within + length * jnp.arange(product.outer, dtype=jnp.int32)[:, None]).reshape(-1)
        before = jnp.pad(within, ((0, 0), (1, 0)))[:, :-1].reshape(-1)
        starts = ends - within.reshape(-1) + before
        last_tiles = jnp.cumsum(-((starts - ends) // product.tile_rows))
        return cls(starts, ends, jnp.pad(last_tiles, (1, 0))[:-1], last_tiles)

    def tiles(self, product: RaggedProduct, number: int) -> _Tiles:
        tile = jnp.arange(number, dtype=jnp.int32)
        run = _found(self.last_tiles, tile)
        start = self.starts[run] + (tile - self.first_tiles[run]) * product.tile_rows
        rows = start[:, None] + jnp.arange(product.tile_rows, dtype=jnp.int32)
        are_theirs = (rows < self.ends[run][:, None]) & (tile < self.last_tiles[-1])[:, None]
        return _Tiles(run % product.groups, rows, are_theirs)

    def rows_of(self, tiles: jax.Array, product: RaggedProduct) -> jax.Array:
        """[rows, ...] of [tiles * tile_rows, ...]: zeros for those in no group."""
        row = jnp.arange(product.rows, dtype=jnp.int32)
        run = _found(self.ends, row)
        start = self.starts[run]
        found = tiles.at[self.first_tiles[run] * product.tile_rows + row - start].get(mode="clip")
        have_one = (start <= row) & (row < self.ends[run])
        return jnp.where(lax.expand_dims(have_one, range(1, found.ndim)), found, jnp.zeros_like(found))


def _found(ends: jax.Array, values: jax.Array) -> jax.Array:
    """The first whose end is beyond each value; the last of all if there is none."""
    return jnp.minimum(jnp.sum(ends <= values[:, None], axis=1, dtype=jnp.int32), ends.size - 1)


def _in_parts(product: RaggedProduct, sizes: jax.Array, matrices: jax.Array) -> tuple[_Runs, _Tiles]:
    """Runs, and tiles of [parts, tiles]: as many together as have no more than so many bytes of ``matrices``."""
    bytes_of_one = max(matrices.nbytes // product.groups, 1)
    parts = math.ceil(product.tiles / max(_BYTES_AT_ONCE // bytes_of_one, 1))
    together = math.ceil(product.tiles / parts)
    runs = _Runs.of(product, sizes)
    tiles = runs.tiles(product, parts * together)
    return runs, _Tiles(*(each.reshape(parts, together, *each.shape[1:]) for each in tiles))


def _rows(
    product: RaggedProduct,
    sizes: jax.Array,
    x: jax.Array,
    matrices: jax.Array,
    contracted: Sequence[Sequence[int]],
    dot: Callable[..., jax.Array],
) -> jax.Array:
    """[rows, ...]: those of ``x``, each times the matrix of its group."""
    of_x, of_matrices = contracted
    dimensions = ([1 + dim for dim in of_x], of_matrices), ([0], [0])
    runs, parts = _in_parts(product, sizes, matrices)
    made = lax.map(lambda tiles: dot(tiles.of(x), matrices[tiles.groups], dimensions), parts)
    return runs.rows_of(lax.collapse(made, 0, 3), product)


def _sums(
    product: RaggedProduct, sizes: jax.Array, x: jax.Array, y: jax.Array, dot: Callable[..., jax.Array], dtype: Any
) -> jax.Array:
    """[groups, ...]: for each group the sum over its rows of a row of ``x`` times a row of ``y``."""
    nothing = jnp.zeros((product.groups, *x.shape[1:], *y.shape[1:]), dtype)
    _, parts = _in_parts(product, sizes, nothing)

    def added(sums: jax.Array, tiles: _Tiles) -> tuple[jax.Array, None]:
        made = dot(tiles.of(x), tiles.of(y), (([1], [1]), ([0], [0])))
        return sums.at[tiles.groups].add(made, indices_are_sorted=product.outer == 1), None

    return lax.scan(added, nothing, parts)[0]
