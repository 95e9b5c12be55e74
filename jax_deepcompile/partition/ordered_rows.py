"""Rows that each part has in an order of its own, and where they went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jax_deepcompile.ir.known_values import Makers


@dataclass(frozen=True, eq=False)
class Order:
    """Rows in the order of a sort."""

    sort: Any

    @property
    def keys(self) -> Any:
        return self.sort.invars[0]

    @property
    def length(self) -> int:
        return self.keys.aval.shape[0]

    def numbers(self, dtype: Any) -> np.ndarray:
        return np.arange(self.length, dtype=dtype)

    def are_numbers(self, values: np.ndarray | None) -> bool:
        """Whether ``values`` are the numbers of rows, perhaps as indices that are vectors."""
        if values is None or values.dtype.kind not in "iu":
            return False
        return np.array_equal(values.reshape(-1).astype(np.int64), np.arange(self.length))


@dataclass(frozen=True)
class Rows:
    """A value whose rows are in an order, each part's by itself.

    Attributes:
      var: the new one, [parts, ...].
      dim: the dimension of rows, of the old one.
      order: which order.
      numbers: what it is for the number that a row had before; None if it depends on more.
    """

    var: Any
    dim: int
    order: Order
    numbers: np.ndarray | None = None


@dataclass(frozen=True)
class Places:
    """For every row, in the order that they had before, where it is now, or something made of that.

    Attributes:
      var: the place among those of its part, [parts, rows].
      order: the new one.
      numbers: what this is for every place.
    """

    var: Any
    order: Order
    numbers: np.ndarray


def holds(dtype: Any, length: int) -> bool:
    """Whether a type has the numbers of so many rows."""
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max >= length - 1


def is_uniform(atom: Any, dim: int, makers: Makers) -> bool:
    """Whether ``atom`` is alike all along ``dim``, as what is broadcast is."""
    maker = None if isinstance(atom, jex.Literal) else makers.get(atom)
    if maker is None or maker.primitive.name not in ("broadcast_in_dim", "iota"):
        return False
    if maker.primitive.name == "iota":
        return maker.params["dimension"] != dim
    source, dims = maker.invars[0].aval.shape, maker.params["broadcast_dimensions"]
    return dim not in dims or source[dims.index(dim)] != maker.params["shape"][dim]


def split(values: jax.Array, parts: int, dim: int = 0) -> jax.Array:
    """[parts, ...] of what has its parts along ``dim``."""
    shape = values.shape
    apart = lax.reshape(values, (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]))
    return jnp.moveaxis(apart, dim, 0)


def merged(parts: jax.Array, dim: int) -> jax.Array:
    return lax.collapse(jnp.moveaxis(parts, 0, dim), dim, dim + 2)
