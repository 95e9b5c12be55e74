"""Moving a value from one placement to another: what it takes, what it costs, and how ``shard_map`` does it."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, AxisPlacement, MeshAxes, Placement


class MoveKind(StrEnum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    SLICE = "slice"
    MASK = "mask"

    @property
    def communicates(self) -> bool:
        return self not in (MoveKind.SLICE, MoveKind.MASK)


@dataclass(frozen=True)
class Move:
    """One step of a resharding.

    Attributes:
      kind: what happens.
      axes: the mesh axes it happens over, major first.
      dim: the dimension gathered, scattered, sliced, or split by an all-to-all; unused by all-reduce and mask.
      concat_dim: the dimension an all-to-all concatenates.
    """

    kind: MoveKind
    axes: tuple[str, ...]
    dim: int = -1
    concat_dim: int = -1


def axis_bytes(source: AxisPlacement, target: AxisPlacement, full_bytes: float, size: int) -> float:
    """Bytes a device sends to change one axis's placement of a value of ``full_bytes``, by ring algorithms."""
    if source in (target, REPLICATE) or size == 1:
        return 0.0
    ring = (size - 1) / size
    if source == PARTIAL:
        return full_bytes * ring * (2 if target == REPLICATE else 1)
    if target in (REPLICATE, PARTIAL):
        return full_bytes * ring
    return full_bytes / size * ring


class Size(NamedTuple):
    """How large a value is, whole."""

    bytes: float
    carried: float
    """What adding it up in a loop takes: half-precision floats are added in 32 bits and rounded at the end."""


_OUT_OF_THE_LOOP = 1e3
"""How much dearer than sending a byte it is to need one of another iteration, as that ends the loop."""

_LEFT_OUT = 1e-3
"""How much cheaper than summing a value it is to add it in one iteration only."""


def axis_cost(source: AxisPlacement, target: AxisPlacement, size: Size, axis: int, mesh: MeshAxes) -> float:
    """Bytes a device sends to change the placement along ``axis``, or what stands for them along a virtual one.

    There nothing is sent. A sum is carried through the loop, which takes the less the smaller it is; to split costs
    nothing; all else needs the parts of several iterations at once. Where there is a loop a sum over devices is best
    done after it, too, and is weighed alike.
    """
    if mesh.virtual and {source, target} == {PARTIAL, REPLICATE}:
        return size.carried * (1.0 if source == PARTIAL else _LEFT_OUT)
    if not mesh.is_virtual(axis):
        return axis_bytes(source, target, size.bytes, mesh.sizes[axis])
    return 0.0 if source in (target, REPLICATE) else size.carried * _OUT_OF_THE_LOOP


@functools.lru_cache(maxsize=65536)
def plan_moves(source: Placement, target: Placement, mesh: MeshAxes) -> tuple[Move, ...]:
    """The moves that turn ``source`` into ``target``, in order.

    A dimension is split major-first in mesh order, so an axis can only be taken from or added to the end of a
    dimension's list of axes: what lies behind it is gathered with it and cut again, which costs no communication.
    """
    current = list(source.axes)
    leaving = {dim: _suffix_to_gather(dim, source, target) for dim in {axis for axis in source.axes if axis >= 0}}
    moves = _scatter_first(current, target, leaving, mesh)
    scatters_later = any(state == PARTIAL and target.axes[axis] >= 0 for axis, state in enumerate(current))
    if not scatters_later:
        moves += _sum(current, target, mesh)
    moves += _gather_and_exchange(current, target, leaving, mesh)
    for axis, wanted in enumerate(target.axes):
        if wanted >= 0 and current[axis] != wanted:
            kind = MoveKind.REDUCE_SCATTER if current[axis] == PARTIAL else MoveKind.SLICE
            moves.append(Move(kind, (mesh.names[axis],), wanted))
            current[axis] = wanted
    moves += _sum(current, target, mesh)
    masked = [axis for axis, wanted in enumerate(target.axes) if wanted == PARTIAL and current[axis] == REPLICATE]
    if masked:
        moves.append(Move(MoveKind.MASK, tuple(mesh.names[axis] for axis in masked)))
    return tuple(_scattered_at_once(moves, mesh))


def _scattered_at_once(moves: Sequence[Move], mesh: MeshAxes) -> list[Move]:
    """``moves`` with one reduce-scatter over several axes in place of one for each: its rings cross nodes but once."""
    joined: list[Move] = []
    for move in moves:
        last = joined[-1] if joined else None
        if last is not None and _scatters(last, mesh) and _scatters(move, mesh) and last.dim == move.dim:
            joined[-1] = Move(MoveKind.REDUCE_SCATTER, (*last.axes, *move.axes), move.dim)
        else:
            joined.append(move)
    return joined


def _scatters(move: Move, mesh: MeshAxes) -> bool:
    """Whether a move reduces and scatters over devices."""
    return move.kind is MoveKind.REDUCE_SCATTER and not set(mesh.virtual).intersection(move.axes)


def _scatter_first(current: list[int], target: Placement, leaving, mesh: MeshAxes) -> list[Move]:
    """Partial sums scattered along dimensions that nothing leaves: what follows then moves only a part."""
    moves = []
    for axis, wanted in enumerate(target.axes):
        is_free = current[axis] == PARTIAL and wanted >= 0 and not leaving.get(wanted)
        if is_free and _is_next(axis, current, target):
            moves.append(Move(MoveKind.REDUCE_SCATTER, (mesh.names[axis],), wanted))
            current[axis] = wanted
    return moves


def _sum(current: list[int], target: Placement, mesh: MeshAxes) -> list[Move]:
    """One all-reduce over all axes along which the value is partial and shall be whole."""
    axes = [axis for axis, state in enumerate(current) if state == PARTIAL and target.axes[axis] == REPLICATE]
    for axis in axes:
        current[axis] = REPLICATE
    return [Move(MoveKind.ALL_REDUCE, tuple(mesh.names[axis] for axis in axes))] if axes else []


def _gather_and_exchange(current: list[int], target: Placement, leaving, mesh: MeshAxes) -> list[Move]:
    """Takes every axis off the dimensions it leaves; straight onto another dimension where nothing is in the way."""
    moves, swaps = [], []
    for dim, axes in sorted(leaving.items()):
        if not axes:
            continue
        destination = target.axes[axes[0]]
        if len(axes) == 1 and destination >= 0 and not leaving.get(destination):
            swaps.append((dim, axes[0], destination))
            continue
        moves.append(Move(MoveKind.ALL_GATHER, tuple(mesh.names[axis] for axis in axes), dim))
        for axis in axes:
            current[axis] = REPLICATE
    for dim, axis, destination in swaps:
        if _is_next(axis, current, target):
            moves.append(Move(MoveKind.ALL_TO_ALL, (mesh.names[axis],), destination, dim))
            current[axis] = destination
        else:
            moves.append(Move(MoveKind.ALL_GATHER, (mesh.names[axis],), dim))
            current[axis] = REPLICATE
    return moves


def _is_next(axis: int, current: Sequence[int], target: Placement) -> bool:
    """Whether the dimension that ``axis`` is to split is split by just those axes that come before it."""
    on_dim = [other for other, state in enumerate(current) if state == target.axes[axis]]
    return on_dim == [other for other in target.axes_of(target.axes[axis]) if other < axis]


def _suffix_to_gather(dim: int, source: Placement, target: Placement) -> tuple[int, ...]:
    held, wanted = source.axes_of(dim), target.axes_of(dim)
    kept = 0
    while kept < min(len(held), len(wanted)) and held[kept] == wanted[kept]:
        kept += 1
    return held[kept:]


def collectives(source: Placement, target: Placement, mesh: MeshAxes) -> int:
    """How many collectives the resharding launches."""
    return sum(move.kind.communicates for move in plan_moves(source, target, mesh))


def apply_move(value: jax.Array, move: Move, mesh: MeshAxes) -> jax.Array:
    """Performs ``move`` on the local block ``value``; call it where ``move.axes`` are manual."""
    axes = move.axes
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        moved = apply_move(jax.random.key_data(value), move, mesh)
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(value))
    match move.kind:
        case MoveKind.ALL_GATHER:
            return lax.all_gather(value, axes, axis=move.dim, tiled=True)
        case MoveKind.REDUCE_SCATTER:
            return lax.psum_scatter(value, axes, scatter_dimension=move.dim, tiled=True)
        case MoveKind.ALL_REDUCE:
            return lax.psum(value, axes)
        case MoveKind.ALL_TO_ALL:
            return lax.all_to_all(value, axes, split_axis=move.dim, concat_axis=move.concat_dim, tiled=True)
        case MoveKind.SLICE:
            width = value.shape[move.dim] // mesh.size_of(move.axes)
            return lax.dynamic_slice_in_dim(value, axis_position(move.axes, mesh) * width, width, axis=move.dim)
        case MoveKind.MASK:
            return jnp.where(axis_position(move.axes, mesh) == 0, value, jnp.zeros_like(value))


def axis_position(names: Sequence[str], mesh: MeshAxes) -> jax.Array:
    """This device's index along the axes ``names`` taken together, major first."""
    position = jnp.zeros((), jnp.int32)
    for name in names:
        position = position * mesh.size_of((name,)) + lax.axis_index(name)
    return position


def size_of(aval) -> Size:
    half = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
    return Size(full_bytes(aval), full_bytes(aval) + 4.0 * math.prod(aval.shape) * half)


def full_bytes(aval) -> float:
    """Bytes of a whole value; random keys count as their key data."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return 8.0 * math.prod(aval.shape)
    return float(math.prod(aval.shape) * aval.dtype.itemsize)
