"""A call's arguments on the devices where a step wants them, and what compiling needs to know of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import ArrayImpl
from jax_deepcompile.ir.program import Port


def move(
    args: tuple,
    targets: Sequence[NamedSharding | None],
    returned: Collection[int],
    donated: Collection[int],
    mesh: Mesh | AbstractMesh,
) -> tuple[tuple, bool]:
    """Puts what ``jax.jit`` would refuse where the step wants it.

    Args:
      args: positional arguments, and a dictionary of the others.
      targets: where every leaf goes; None where it may stay.
      returned: positions of the leaves that are state, which the next call gets where it is wanted.
      donated: positions of the leaves whose buffers the step takes.
      mesh: the step's.

    Returns:
      The arguments, and whether anything was moved that the next call will have to move again.
    """
    leaves, tree = jax.tree.flatten(args)
    kept = {id(leaf) for index, leaf in enumerate(leaves) if index not in donated}
    there, is_moved = [], False
    for index, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        new = _moved(leaf, target, mesh, index in returned)
        is_moved |= new is not leaf and index not in returned
        if index in donated:
            again = new is leaf and id(leaf) in kept and isinstance(leaf, jax.Array)
            there.append(jnp.copy(leaf) if again else new)
            kept.add(id(leaf))
        else:
            there.append(new)
    return jax.tree.unflatten(tree, there), is_moved


def are_plain(args: tuple) -> bool:
    """Whether every array in ``args`` is in memory, and there once: XLA crashes on buffers that are gone or used twice.

    All leaves are looked at before every step: in loops that Python's interpreter takes no part in.
    """
    leaves = [jax.tree.leaves(arg) for arg in args]
    return not any(map(_any_deleted, leaves)) and not _any_repeated(list(itertools.chain.from_iterable(leaves)))


def _any_deleted(leaves: list) -> bool:
    try:
        return any(map(ArrayImpl.is_deleted, leaves))
    except TypeError:  # what is no array in memory is among them
        return any(map(_is_deleted, leaves))


def _any_repeated(leaves: list) -> bool:
    if len(set(map(id, leaves))) == len(leaves):
        return False
    arrays = [id(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
    return len(set(arrays)) < len(arrays)


def refuse_deleted(args: tuple, ports: Sequence[Port], function: str) -> None:
    """Raises StateDonatedError if the memory of a leaf of ``args`` is gone; XLA may crash on it.

    Args:
      args: of a call.
      ports: what each leaf is.
      function: the step's name.
    """
    for leaf, port in zip(jax.tree.leaves(args), ports, strict=True):
        if _is_deleted(leaf):
            raise errors.StateDonatedError(function, port.path, leaf.shape, str(leaf.dtype), port.role.is_state)


def shapes_only(args: tuple, targets: Sequence[NamedSharding | None], ports: Sequence[Port]) -> tuple:
    """``args`` without their values, with the shardings of a call's: that finds what was compiled ahead of time."""
    leaves, tree = jax.tree.flatten(args)
    return jax.tree.unflatten(tree, map(_shape_only, leaves, targets, ports))


def _is_deleted(leaf: Any) -> bool:
    return is_concrete(leaf) and leaf.is_deleted()


def is_concrete(leaf: Any) -> TypeGuard[jax.Array]:
    """Whether ``leaf`` is an array in memory, rather than one that a transformation of JAX traces the step with."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _moved(leaf: Any, target: NamedSharding | None, mesh: Mesh | AbstractMesh, is_state: bool) -> Any:
    """State is put where the next call will have it, and what is compiled for one serves the other."""
    if isinstance(leaf, Tracer):
        return leaf
    if isinstance(leaf, jax.Array):
        if target is None:
            on_mesh = len(leaf.sharding.device_set) == mesh.size
            return leaf if on_mesh else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
        fits = (not leaf.committed and not is_state) or leaf.sharding.is_equivalent_to(target, leaf.ndim)
        return leaf if fits else jax.device_put(leaf, target)
    return leaf


def _shape_only(leaf: Any, target: NamedSharding | None, port: Port) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct) and port.role.is_state and leaf.sharding is None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target, weak_type=leaf.weak_type)
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf
    sharding = leaf.sharding if is_concrete(leaf) and leaf.committed and target in (None, leaf.sharding) else None
    # Neither NumPy's arrays nor arrays of random keys say whether their type is weak.
    weak_type = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak_type)
