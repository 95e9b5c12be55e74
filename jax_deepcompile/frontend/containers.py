"""Containers that take nothing but arrays, as classes do that check or convert what they are made of: opened.

JAX makes the containers of a call of arrays and tracers, and of shapes, shardings and its own descriptions of arguments
only where it is asked for these. So do we.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Opened:
    """What stands for a container: what is in it, which may be anything.

    Attributes:
      kind: the class of the container.
      level: its structure, without what is inside.
      keys: what is inside by.
      inside: opened.
    """

    kind: type
    level: Any
    keys: tuple
    inside: tuple

    def tree_flatten_with_keys(self) -> tuple[list, tuple]:
        return list(zip(self.keys, self.inside, strict=True)), (self.kind, self.level, self.keys)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        return self.inside, (self.kind, self.level, self.keys)

    @classmethod
    def tree_unflatten(cls, fields: tuple, inside: Iterable) -> Opened:
        kind, level, keys = fields
        return cls(kind, level, keys, tuple(inside))


def opened(tree: Any) -> Any:
    """``tree`` with every container ``Opened`` that takes nothing but arrays."""
    if isinstance(tree, Opened) or not _takes_arrays_only(jax.tree.structure(tree)):
        return tree
    found = children(tree)
    level = jax.tree.structure(tree, is_leaf=lambda node: node is not tree)
    inside = tuple(opened(child) for _, child in found)
    try:
        made = level.unflatten(inside)
        jax.tree.structure(made).unflatten([_NoArray()] * len(jax.tree.leaves(made)))
    except Exception:
        return Opened(type(tree), level, tuple(key for (key,), _ in found), inside)
    return made


def closed(tree: Any) -> Any:
    """``opened`` undone."""

    def closing(node: Any) -> Any:
        return jax.tree.unflatten(node.level, map(closed, node.inside)) if _is_opened(node) else node

    return jax.tree.map(closing, tree, is_leaf=_is_opened)


def contained(trees: Iterable, leaves: Iterable) -> tuple:
    """The arguments of a call, of which every one has its structure in ``trees``, made of all their ``leaves``.

    Those are in a tuple if a container takes arrays only, for JAX to describe them.
    """
    args, rest = [], iter(leaves)
    for tree in trees:
        own = [next(rest) for _ in range(tree.num_leaves)]
        args.append(tuple(own) if takes_arrays_only(tree) else jax.tree.unflatten(tree, own))
    return tuple(args)


def children(node: Any) -> list[tuple[tuple, Any]]:
    """What a pytree's node is made of, each with its path in there."""
    return jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda other: other is not node)


def kind_of(node: Any) -> type:
    """The class of a container, opened or not."""
    return node.kind if isinstance(node, Opened) else type(node)


def _takes_arrays_only(tree: Any) -> bool:
    """Whether a container of ``tree`` refuses other things, or was opened for that.

    Classes may leave their checks out for ``jax.tree`` alone; JAX itself asks a structure.
    """
    try:
        made = tree.unflatten([_NoArray()] * tree.num_leaves)
    except Exception:
        return True
    return any(map(_is_opened, jax.tree.leaves(made, is_leaf=_is_opened)))


takes_arrays_only = functools.lru_cache(maxsize=1 << 10)(_takes_arrays_only)


class _NoArray:
    """What nobody expects in a container."""


def _is_opened(node: Any) -> bool:
    return isinstance(node, Opened)
