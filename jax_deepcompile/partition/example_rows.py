"""Where examples are in a dimension that has several rows of each: one after the other, or side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class ExampleRows:
    """What a dimension has of examples.

    The step has it as [copies, examples, each]: all examples, and then all of them again. In memory it is
    [examples, copies, each], so that what belongs to an example is where the example is.

    Attributes:
      copies: how often all examples come one after the other. One: they are where they were.
      examples: how many they are.
      each: rows of an example that lie together in the step as well.
      sources: by ``id`` the equations that put examples one after the other.
    """

    copies: int
    examples: int
    each: int
    sources: frozenset[int] = field(default=frozenset(), compare=False)

    @property
    def are_moved(self) -> bool:
        return self.copies > 1

    @property
    def block(self) -> int:
        """Rows of all examples once."""
        return self.examples * self.each

    def times(self, copies: int) -> ExampleRows:
        """As many copies instead."""
        return replace(self, copies=copies, sources=self.sources if copies > 1 else frozenset())

    def made_by(self, source: int) -> ExampleRows:
        return replace(self, sources=self.sources | {source})


Dims = Mapping[int, ExampleRows]
"""By the dimensions of a value."""


def apart(x: jax.Array, dim: int, rows: ExampleRows) -> jax.Array:
    """[..., examples, copies, each, ...] of what is in memory."""
    copies = x.shape[dim] // rows.block
    return x.reshape(*x.shape[:dim], rows.examples, copies, rows.each, *x.shape[dim + 1 :])


def together(x: jax.Array, dim: int) -> jax.Array:
    """The other way round."""
    return lax.collapse(x, dim, dim + 3)


def side_by_side(x: jax.Array, dim: int, rows: ExampleRows) -> jax.Array:
    """What is in the step's order as it is in memory."""
    x = x.reshape(*x.shape[:dim], rows.copies, rows.examples, rows.each, *x.shape[dim + 1 :])
    return together(jnp.swapaxes(x, dim, dim + 1), dim)


def in_step_order(x: jax.Array, dim: int, rows: ExampleRows) -> jax.Array:
    """The other way round."""
    return together(jnp.swapaxes(apart(x, dim, rows), dim, dim + 1), dim)


def counted(dtype: jnp.dtype, shape: Sequence[int], dim: int, rows: ExampleRows) -> jax.Array:
    """The numbers that rows of ``dim`` have in the step, as they are in memory."""
    sizes = (rows.examples, rows.copies, rows.each)
    example, copy, row = (lax.broadcasted_iota(dtype, sizes, each) for each in range(3))
    numbers = copy * rows.block + example * rows.each + row
    return lax.broadcast_in_dim(numbers.reshape(-1), shape, (dim,))
