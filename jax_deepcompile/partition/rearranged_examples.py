"""Equations that put examples one after the other, or take them apart, on rows that are side by side instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_deepcompile.partition.example_rows import Dims, ExampleRows, apart, together


@dataclass(frozen=True)
class Change:
    """What an equation becomes.

    Attributes:
      compute: in its place; None if it stays as it is.
      operands: where they must have examples.
      results: where these have them then.
    """

    compute: Callable[..., Any] | None
    operands: Sequence[Dims]
    results: Sequence[Dims]


def rearranged(eqn: Any, dims: Sequence[Dims], depends: Sequence[bool]) -> Change | None:
    """What becomes of ``eqn``; None if it computes like others, or of all examples.

    Args:
      dims: where its operands have examples.
      depends: which of them depend on the batch.
    """
    match eqn.primitive.name:
        case "concatenate":
            return _concatenated(eqn, dims, depends)
        case "tile":
            return _tiled(eqn, dims[0])
        case "pad":
            return _padded(eqn, dims[0])
        case "slice":
            return _sliced(eqn, dims[0])
        case "split":
            return _split(eqn, dims[0])
        case "reshape":
            return _reshaped(eqn, dims[0])
    return None


def _concatenated(eqn: Any, dims: Sequence[Dims], depends: Sequence[bool]) -> Change | None:
    """Each of as many rows of all examples, or of what no example is of."""
    dim = eqn.params["dimension"]
    found = [each.get(dim) for each in dims]
    rows = next(filter(None, found), None)
    if rows is None or len(found) == 1:
        return None
    for atom, each, of_batch in zip(eqn.invars, found, depends, strict=True):
        other = of_batch or atom.aval.shape[dim] != rows.block
        if other if each is None else (each.examples, each.each) != (rows.examples, rows.each):
            return None
    each_rows = [rows.times(1) if each is None else each for each in found]

    def join(*values: jax.Array) -> jax.Array:
        return together(jnp.concatenate([apart(value, dim, rows) for value in values], dim + 1), dim)

    sources = frozenset().union(*(each.sources for each in each_rows))
    joined = ExampleRows(sum(each.copies for each in each_rows), rows.examples, rows.each, sources)
    return Change(join, [{dim: each} for each in each_rows], [{dim: joined}])


def _tiled(eqn: Any, dims: Dims) -> Change | None:
    repeated = [dim for dim, times in enumerate(eqn.params["reps"]) if times > 1]
    if len(repeated) != 1 or repeated[0] not in dims:
        return None
    dim, times, rows = repeated[0], eqn.params["reps"][repeated[0]], dims[repeated[0]]

    def repeat(x: jax.Array) -> jax.Array:
        return together(jnp.concatenate([apart(x, dim, rows)] * times, dim + 1), dim)

    return Change(repeat, [{dim: rows}], [{dim: rows.times(times * rows.copies)}])


def _padded(eqn: Any, dims: Dims) -> Change | None:
    """By rows of all examples."""
    config = eqn.params["padding_config"]
    longer = {dim: rows for dim, rows in dims.items() if any(config[dim])}
    if len(longer) != 1:
        return None
    ((dim, rows),) = longer.items()
    low, high, between = config[dim]
    if between or low < 0 or high < 0 or low % rows.block or high % rows.block:
        return None
    none = (0, 0, 0)
    by_rows = (*config[:dim], none, (low // rows.block, high // rows.block, 0), none, *config[dim + 1 :])

    def pad(x: jax.Array, value: jax.Array) -> jax.Array:
        return together(lax.pad(apart(x, dim, rows), value, by_rows), dim)

    return Change(pad, [{dim: rows}, {}], [{dim: rows.times(rows.copies + (low + high) // rows.block)}])


def _sliced(eqn: Any, dims: Dims) -> Change | None:
    """Rows of all examples, some of their copies."""
    shape, starts, limits = eqn.invars[0].aval.shape, eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    cut = [dim for dim, rows in dims.items() if rows.are_moved and (starts[dim], limits[dim]) != (0, shape[dim])]
    if len(cut) != 1 or strides[cut[0]] != 1:
        return None
    (dim,), rows = cut, dims[cut[0]]
    (first, early), (end, late) = (divmod(each[dim], rows.block) for each in (starts, limits))
    if early or late or first == end:
        return None
    others = [
        slice(None) if each == dim else slice(*bounds)
        for each, bounds in enumerate(zip(starts, limits, strides, strict=True))
    ]

    def take(x: jax.Array) -> jax.Array:
        return together(lax.slice_in_dim(apart(x[tuple(others)], dim, rows), first, end, axis=dim + 1), dim)

    return Change(take, [{dim: rows}], [{dim: rows.times(end - first)}])


def _split(eqn: Any, dims: Dims) -> Change | None:
    dim, sizes = eqn.params["axis"], list(map(int, eqn.params["sizes"]))
    rows = dims.get(dim)
    if rows is None or not rows.are_moved or any(not size or size % rows.block for size in sizes):
        return None
    copies = [size // rows.block for size in sizes]

    def split(x: jax.Array) -> list[jax.Array]:
        return [together(part, dim) for part in lax.split(apart(x, dim, rows), copies, dim + 1)]

    return Change(split, [{dim: rows}], [{dim: rows.times(each)} for each in copies])


def _reshaped(eqn: Any, dims: Dims) -> Change | None:
    shape, new_shape = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None or not all(shape):
        return None
    changes, results, torn = _regrouped(dims, shape, new_shape)
    kept = {dim: rows for dim, rows in dims.items() if dim not in torn}
    if all(change.keeps_order for change in changes):
        return Change(None, [kept], [results])

    def reshape(x: jax.Array) -> jax.Array:
        for change in reversed(changes):
            x = x if change.keeps_order else change.apply(x)
        return x.reshape(new_shape)

    return Change(reshape, [kept], [results])


@dataclass(frozen=True)
class _Regrouping:
    """How a reshape changes dimensions of which one has examples.

    Attributes:
      dims: of the operand, first and one after the last.
      before: what is ahead of the examples in them, and the examples' own copies.
      after: what is ahead of them in the result, and their copies there.
      examples: how many.
    """

    dims: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    examples: int

    @property
    def keeps_order(self) -> bool:
        (ahead, copies), (ahead_after, copies_after) = self.before, self.after
        return ahead == ahead_after == 1 or copies == copies_after == 1

    def apply(self, x: jax.Array) -> jax.Array:
        """[..., ahead, examples, copies, each, ...] as the result is in memory."""
        first, end = self.dims
        (ahead, copies), (ahead_after, copies_after) = self.before, self.after
        start, rest = x.shape[:first], x.shape[end:]
        x = x.reshape(*start, ahead, self.examples, copies, -1, *rest)
        x = jnp.swapaxes(x, first + 1, first + 2)
        x = x.reshape(*start, ahead_after, copies_after, self.examples, -1, *rest)
        return jnp.swapaxes(x, first + 1, first + 2)


def _regrouped(dims: Dims, shape: Sequence[int], new_shape: Sequence[int]) -> tuple[list[_Regrouping], Dims, list[int]]:
    """What a reshape does to ``dims``: how, those of the result, and those of the operand that it tears apart."""
    changes, results, torn = [], {}, []
    for (first, end), (new_first, new_end) in _groups(shape, new_shape):
        inside = [dim for dim in dims if first <= dim < end]
        found = None
        if len(inside) == 1:
            (dim,) = inside
            rows, ahead = dims[dim], math.prod(shape[first:dim])
            found = _found_in(rows, ahead * rows.copies, new_shape, range(new_first, new_end))
        if found is None:
            torn += inside
            continue
        new_dim, results[new_dim] = found
        ahead_after = math.prod(new_shape[new_first:new_dim])
        after = (ahead_after, results[new_dim].copies)
        changes.append(_Regrouping((first, end), (ahead, rows.copies), after, rows.examples))
    return changes, results, torn


def _found_in(rows: ExampleRows, ahead: int, shape: Sequence[int], dims: range) -> tuple[int, ExampleRows] | None:
    """Which dimension of a result has the examples that come ``ahead`` times one after the other."""
    for dim in dims:
        copies, rest = divmod(ahead, math.prod(shape[dims.start : dim]))
        if not rest and shape[dim] % (copies * rows.examples) == 0:
            return dim, replace(rows.times(copies), each=shape[dim] // (copies * rows.examples))
    return None


def _groups(shape: Sequence[int], new_shape: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The fewest adjacent dimensions of two shapes that have as many elements."""
    sizes, new_sizes = (list(itertools.accumulate(each, int.__mul__)) for each in (shape, new_shape))
    shared = sorted(set(sizes) & set(new_sizes))
    first = new_first = 0
    for size in shared:
        end, new_end = sizes.index(size) + 1, new_sizes.index(size) + 1
        if end > first and new_end > new_first:
            yield (first, end), (new_first, new_end)
        first, new_first = max(first, end), max(new_first, new_end)
