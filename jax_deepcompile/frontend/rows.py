"""The rows of a batch: how many an argument has, and those that each process passes of what all of them have."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jax_deepcompile import errors
from jax_deepcompile.frontend.arguments import is_concrete


def examples(arg: Any) -> set[int]:
    """What the leaves of ``arg`` have along dimension 0, scalars aside."""
    return {leaf.shape[0] for leaf in jax.tree.leaves(arg) if getattr(leaf, "shape", ())}


def join_rows(arg: Any, name: str, sharding: NamedSharding) -> Any:
    """Makes of the rows that this process has, and others theirs, arrays that all processes have.

    Args:
      arg: a batch argument: numpy arrays or arrays of this process's devices; all else is left alone.
      name: what the user calls it.
      sharding: how rows are divided.

    Raises:
      BatchNotDivisibleError: this process's devices cannot have equally many of its rows.
    """
    parts, _ = _parts(sharding)

    def joined(path, leaf):
        if not _has_own_rows(leaf):
            return leaf
        if leaf.shape[0] % parts:
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise errors.BatchNotDivisibleError(where, leaf.shape, parts, "this process's devices")
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree_util.tree_map_with_path(joined, arg)


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
    is_own = leaf.is_fully_addressable if is_concrete(leaf) else isinstance(leaf, np.ndarray)
    return is_own and bool(leaf.shape)


def _parts(sharding: NamedSharding) -> tuple[int, int]:
    """Into how many parts this process's devices, and those of all processes, divide rows."""
    places = {device: rows.start for device, (rows,) in sharding.devices_indices_map((sharding.mesh.size,)).items()}
    return len({places[device] for device in sharding.addressable_devices}), len(set(places.values()))
