"""A call's arguments on the devices where a step wants them, what compiling needs to know of them, and their rows."""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import ArrayImpl, is_tracing
from jax_deepcompile.frontend.call import abstract
from jax_deepcompile.frontend.containers import contained
from jax_deepcompile.frontend.signature import examples
from jax_deepcompile.ir.memory import HOST_KIND
from jax_deepcompile.ir.program import Port, Program, Role
from jax_deepcompile.summary import size_text


def move(
    args: tuple,
    targets: Sequence[NamedSharding | None],
    returned: Collection[int],
    donated: Collection[int],
    unread: Collection[int],
    mesh: Mesh | AbstractMesh,
) -> tuple[tuple, bool]:
    """Puts what ``jax.jit`` would refuse where the step wants it.

    Args:
      targets: where every leaf goes; None where it may stay.
      returned: positions of the leaves that the step returns anew, which the next call gets where it is wanted.
      donated: positions of the leaves whose buffers the step takes.
      unread: positions of state that it computes nothing of, which may be in any memory of the devices.

    Returns:
      The arguments, ``contained``, and whether anything was moved that the next call will have
      to move again.
    """
    leaves, tree = jax.tree.flatten(args)
    kept = {id(leaf) for index, leaf in enumerate(leaves) if index not in donated}
    there, is_moved = [], False
    for index, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        is_there = index in unread and _is_there(leaf, target)
        new = leaf if is_there else _moved(leaf, target, mesh, index in returned or index in unread)
        is_moved |= new is not leaf and index not in returned
        if index in donated:
            is_shared = id(leaf) in kept and isinstance(leaf, jax.Array)  # what was moved may have its memory still
            new = jnp.copy(new) if is_shared else new
            kept.add(id(leaf))
        there.append(new)
    return contained(tree.children(), there), is_moved


def arrays_among(positions: Collection[int], args: tuple) -> frozenset[int]:
    """Those of ``positions`` where ``args`` have arrays in memory."""
    leaves = jax.tree.leaves(args) if positions else ()
    return frozenset(at for at in positions if is_concrete(leaves[at]))


def tell_what_is_moved(args: tuple, targets: Sequence[NamedSharding | None], program: Program) -> None:
    """Logs it if an evaluation finds much of its state elsewhere, as that is moved in every call."""
    if program.state_outputs:
        return
    leaves = enumerate(zip(jax.tree.leaves(args), targets, strict=True))
    read = [pair for at, pair in leaves if program.inputs[at].role.is_state and at not in program.unread_state]
    moved_bytes = sum(leaf.nbytes for leaf, target in read if _is_array(leaf) and not _is_there(leaf, target))
    if moved_bytes > _MOVED_BYTES:
        text = "%s moves %s of its state to the devices in every call; what steps and their init return is there"
        logging.getLogger("jax_deepcompile").warning(text, program.name, size_text(moved_bytes))


def _is_there(leaf: Any, target: NamedSharding | None) -> bool:
    """Whether an array is where it should be, in any memory of the devices."""
    if not is_concrete(leaf) or explicit_axes(leaf):
        return False
    kind = target and target.memory_kind
    return target is None or kind is None or leaf.sharding.with_memory_kind(kind).is_equivalent_to(target, leaf.ndim)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or is_concrete(leaf)


_MOVED_BYTES = 1 << 26
"""What is moved in every call without a word."""


def free_moved(args: tuple, targets: Sequence[NamedSharding | None], donated: Collection[int], there: tuple) -> None:
    """Frees donated state that ``move`` copied to another memory of the devices that it was on: ``args`` hold it still.

    Args:
      there: what ``move`` made of ``args``.
    """
    leaves = list(zip(jax.tree.leaves(args), jax.tree.leaves(there), targets, strict=True))
    kept = {id(leaf) for at, (leaf, new, _) in enumerate(leaves) if at not in donated or new is leaf}
    for leaf, _, target in leaves:
        if id(leaf) not in kept and _changes_memory(leaf, target):
            leaf.delete()


def _changes_memory(leaf: Any, target: NamedSharding | None) -> bool:
    kind = target and target.memory_kind
    return kind is not None and _is_there(leaf, target) and leaf.sharding.memory_kind != kind


def are_plain(args: tuple, placed: Mapping[int, bool]) -> bool:
    """Whether every array in ``args`` is in memory, and there once: XLA crashes on buffers that are gone or used twice.

    Nor are those that are on certain devices, or on none, where others were: for them the step would be compiled once
    more. All leaves are looked at before every step, in loops that Python's interpreter takes no part in.

    Args:
      placed: whether a leaf is on certain devices. Of the state that the step returns anew the first and the last do.
    """
    leaves = [jax.tree.leaves(arg) for arg in args]
    if any(map(_any_deleted, leaves)):
        return False
    together = list(itertools.chain.from_iterable(leaves))
    if any(_is_placed(together[at]) is not is_placed for at, is_placed in placed.items() if at < len(together)):
        return False
    if len(set(map(id, together))) == len(together):
        return True
    arrays = [id(leaf) for leaf in together if isinstance(leaf, jax.Array)]
    return len(set(arrays)) == len(arrays)


def _is_placed(leaf: Any) -> bool:
    """Whether it is on certain devices."""
    return isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and leaf.committed)


@dataclass(frozen=True)
class Form:
    """What JAX compiles a function anew for, though shapes and types are the same.

    Attributes:
      structure: of the arguments.
      placed: which leaves are on certain devices; NumPy's arrays and those that JAX may move are not.
    """

    structure: Any
    placed: tuple[bool, ...]

    @classmethod
    def of(cls, args: tuple) -> Form:
        leaves, structure = jax.tree.flatten(args)
        return cls(structure, tuple(map(_is_placed, leaves)))


def _any_deleted(leaves: list) -> bool:
    try:
        return any(map(ArrayImpl.is_deleted, leaves))
    except TypeError:  # what is no array in memory is among them
        return any(map(_is_deleted, leaves))


def refuse_deleted(args: tuple, ports: Sequence[Port], function: str) -> None:
    """Raises StateDonatedError if the memory of a leaf of ``args`` is gone; XLA may crash on it."""
    for leaf, port in zip(jax.tree.leaves(args), ports, strict=True):
        if _is_deleted(leaf):
            raise errors.StateDonatedError(function, port.path, leaf.shape, str(leaf.dtype), port.role.is_state)


def shapes_only(args: tuple, targets: Sequence[NamedSharding | None], program: Program) -> tuple:
    """``args`` without their values, ``contained``, with a call's shardings: that finds what was compiled ahead."""
    leaves, tree = jax.tree.flatten(args)
    unread = [index in program.unread_state for index in range(len(leaves))]
    return contained(tree.children(), map(_shape_only, leaves, targets, program.inputs, unread))


def on_host(args: tuple, targets: Sequence[NamedSharding | None]) -> tuple:
    """Shapes as ``shapes_only`` makes them, where ``targets`` has some of them on the host."""
    leaves, tree = jax.tree.flatten(args)

    def placed(leaf: Any, target: NamedSharding | None) -> Any:
        if target is None or target.memory_kind != HOST_KIND or not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target, weak_type=leaf.weak_type)

    return contained(tree.children(), map(placed, leaves, targets))


def _is_deleted(leaf: Any) -> bool:
    return is_concrete(leaf) and leaf.is_deleted()


def is_concrete(leaf: Any) -> TypeGuard[jax.Array]:
    """Whether ``leaf`` is an array in memory, rather than one that a transformation of JAX traces the step with."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _moved(leaf: Any, target: NamedSharding | None, mesh: Mesh | AbstractMesh, returns: bool) -> Any:
    """What ``returns`` is put where the next call will have it, and what is compiled for one serves the other."""
    if not is_concrete(leaf):
        is_value = returns and not isinstance(leaf, Tracer) and not is_tracing()
        is_put = is_value or (isinstance(leaf, Tracer) and bool(explicit_axes(leaf)))
        return jax.device_put(leaf, target or NamedSharding(mesh, PartitionSpec())) if is_put else leaf
    if target is None:
        on_mesh = len(leaf.sharding.device_set) == mesh.size and not explicit_axes(leaf)
        return leaf if on_mesh else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
    fits = leaf.sharding == target if returns else _may_stay(leaf, target)
    return leaf if fits and not explicit_axes(leaf) else jax.device_put(leaf, target)


def _may_stay(leaf: jax.Array, target: NamedSharding) -> bool:
    return not leaf.committed or leaf.sharding.is_equivalent_to(target, leaf.ndim)


def explicit_axes(leaf: Any) -> frozenset[str]:
    """The axes of its mesh, which may not be the step's, where its type says along which of them it is divided."""
    if not isinstance(leaf, jax.Array):  # where jit is disabled
        return frozenset()
    sharding = leaf.aval.sharding
    return frozenset(sharding.mesh.axis_names if any(axes is not None for axes in sharding.spec) else ())


def _shape_only(leaf: Any, target: NamedSharding | None, port: Port, is_unread: bool) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct) and port.role.is_state and leaf.sharding is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target, weak_type=leaf.weak_type)
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf
    sharding = leaf.sharding if is_concrete(leaf) and leaf.committed and target in (None, leaf.sharding) else None
    sharding = target if is_unread and sharding is None else sharding
    known = abstract(leaf)
    return jax.ShapeDtypeStruct(known.shape, known.dtype, sharding=sharding, weak_type=known.weak_type)


def join_rows(arg: Any, name: str, sharding: NamedSharding) -> Any:
    """Makes of the rows that this process has, and others theirs, arrays that all processes have.

    They are those of a batch argument, NumPy's or of this process's devices; all else is left alone.

    Raises:
      BatchNotDivisibleError: this process's devices cannot have equally many of its rows.
    """
    parts, _ = _parts(sharding)
    counts = examples(arg)

    def joined(path, leaf):
        if not _has_own_rows(leaf) or leaf.shape[0] not in counts:
            return leaf
        if leaf.shape[0] % parts:
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise errors.BatchNotDivisibleError(where, leaf.shape, parts, "this process's devices")
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
        words = jax.make_array_from_process_local_data(sharding, np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))

    return jax.tree_util.tree_map_with_path(joined, arg)


def replicated_text(args: tuple, ports: Sequence[Port]) -> str:
    """What this process has of what is neither state nor batch, of which all should have the same, to compare."""
    others = [pair for pair in zip(jax.tree.leaves(args), ports, strict=True) if pair[1].role is Role.OTHER]
    return ", ".join(f"{port.path} = {_value_text(leaf)}" for leaf, port in others if _is_own(leaf))


def _value_text(leaf: Any) -> str:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    value = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return str(value) if value.size <= _SHOWN else f"{value.dtype} of digest {zlib.crc32(value.tobytes()):08x}"


_SHOWN = 4
"""Numbers that are said as they are: those of a random key."""


def may_be_rows(arg: Any, batch: Any, sharding: NamedSharding) -> bool:
    """Whether what this process has of ``arg`` may be its rows beside those of ``batch``, or the same everywhere."""
    here, all_of_them = _parts(sharding)

    def together(tree: Any) -> list[int]:
        leaves = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "shape", ())]
        return [leaf.shape[0] * all_of_them // here if _has_own_rows(leaf) else leaf.shape[0] for leaf in leaves]

    own = any(map(_has_own_rows, jax.tree.leaves(arg)))
    return own and len(set(together(arg))) == 1 and set(together(arg)) == set(together(batch))


def _has_own_rows(leaf: Any) -> bool:
    """Whether ``leaf`` is an array of this process alone."""
    return _is_own(leaf) and bool(np.shape(leaf))


def _is_own(leaf: Any) -> bool:
    """Whether ``leaf`` is a number or an array of this process alone."""
    return leaf.is_fully_addressable if is_concrete(leaf) else not isinstance(leaf, Tracer | jax.ShapeDtypeStruct)


def _parts(sharding: NamedSharding) -> tuple[int, int]:
    """Into how many parts this process's devices, and those of all processes, divide rows."""
    places = {device: rows.start for device, (rows,) in sharding.devices_indices_map((sharding.mesh.size,)).items()}
    return len({places[device] for device in sharding.addressable_devices}), len(set(places.values()))
