"""What a step returns in place of its state.

An optimizer's moments, gradients and averages look like parameters: what has the most leaves is found first, what is
returned nearest to the top goes before what is inside of something else, and nothing is taken twice.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_deepcompile import errors
from jax_deepcompile.ir.program import Role
from jax_deepcompile.signature import Signature, port_of


def state_outputs(args: tuple, out_shape: Any, signature: Signature) -> tuple[tuple[int, int], ...]:
    """Pairs (flat input, flat output) of the state arguments and what the step returns in their place.

    Raises:
      StateNotReturnedError, StateChangedError: state is not returned as it came.
    """
    found = _Found(args, out_shape)
    for position in found.most_leaves_first(signature.state):
        if not found.take(position):
            found.explain_missing(position, signature)
    for position in found.most_leaves_first(signature.networks):
        found.take(position)
    for position in found.most_leaves_first(signature.parameters):
        found.take(position, among=signature.parameters)
    if signature.networks and not found.has_any((*signature.networks, *signature.parameters)):
        found.explain_missing(signature.networks[0], signature)
    for position in signature.networks:
        found.refuse_changed(position, signature)
    return found.pairs()


def returned_anew(args: tuple, out_shape: Any, signature: Signature) -> tuple[int, ...]:
    """Positions of the arguments that ``state_outputs`` finds in what the step returns."""
    pairs = state_outputs(args, out_shape, signature)
    ends = list(itertools.accumulate(len(jax.tree.leaves(arg)) for arg in args))
    return tuple(sorted({bisect.bisect_right(ends, leaf) for leaf, _ in pairs}))


def outputs_like_state(args: tuple, out_shape: Any, signature: Signature) -> list[tuple[int, int]]:
    """Pairs like those of ``state_outputs`` of everything returned that looks like state, gradients say."""
    pairs = []
    for position in signature.held:
        structure = jax.tree.structure(args[position])
        start = len(jax.tree.leaves(args[:position]))
        for sub in _subtrees(out_shape):
            if sub.structure == structure and structure.num_leaves > 1 and not _changes(args[position], sub.tree, ""):
                pairs += zip(range(start, start + structure.num_leaves), sub.leaves, strict=True)
    return pairs


class _Found:
    """What has been found so far of the state in what the step returns."""

    def __init__(self, args: tuple, out_shape: Any) -> None:
        self._args = args
        self._out_shape = out_shape
        self._subtrees = sorted(_subtrees(out_shape), key=lambda sub: sub.depth)
        self._found: dict[int, _Subtree] = {}

    def most_leaves_first(self, positions: Sequence[int]) -> list[int]:
        return sorted(positions, key=lambda position: -jax.tree.structure(self._args[position]).num_leaves)

    def has_any(self, positions: Sequence[int]) -> bool:
        return not self._found.keys().isdisjoint(positions)

    def take(self, position: int, among: Sequence[int] = ()) -> bool:
        """Finds the argument's new value, unless it could as well be that of others ``among`` which nothing is left."""
        same = [sub for sub in self._free(position) if not _changes(self._args[position], sub.tree, "")]
        rivals = [other for other in among if other not in self._found and self._are_alike(position, other)]
        if not same or len(same) < len(rivals):
            return False
        self._found[position] = same[0]
        return True

    def refuse_changed(self, position: int, signature: Signature) -> None:
        """Raises StateChangedError if what is left looks like the argument's new value, but for shapes and dtypes."""
        if position in self._found:
            return
        for sub in self._free(position):
            if len(sub.leaves) > 1 or _shapes(sub.tree) == _shapes(self._args[position]):
                changes = _changes(self._args[position], sub.tree, signature.name_of(position))
                raise errors.StateChangedError(signature.function, changes)
        for sub in self._left():
            if _resembles(sub.tree, self._args[position]):
                changes = _structure_changes(self._args[position], sub.tree, signature.name_of(position))
                raise errors.StateChangedError(signature.function, changes)

    def explain_missing(self, position: int, signature: Signature) -> None:
        """Says which of the two it was: state returned in a changed structure, or no state returned at all."""
        self.refuse_changed(position, signature)
        text = str(jax.tree.map(_kind, self._out_shape))
        shown = text if len(text) < 200 else text[:197] + "..."
        raise errors.StateNotReturnedError(signature.function, signature.name_of(position), shown)

    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (len(jax.tree.leaves(self._args[:position])) + index, leaf)
            for position in sorted(self._found)
            for index, leaf in enumerate(self._found[position].leaves)
        )

    def _left(self) -> list[_Subtree]:
        taken = {leaf for sub in self._found.values() for leaf in sub.leaves}
        return [sub for sub in self._subtrees if taken.isdisjoint(sub.leaves)]

    def _free(self, position: int) -> list[_Subtree]:
        wanted = jax.tree.structure(self._args[position])
        return [sub for sub in self._left() if sub.structure == wanted]

    def _are_alike(self, position: int, other: int) -> bool:
        mine, theirs = self._args[position], self._args[other]
        return jax.tree.structure(mine) == jax.tree.structure(theirs) and not _changes(mine, theirs, "")


@dataclass(frozen=True)
class _Subtree:
    """A part of what a step returns.

    Attributes:
      tree: the part.
      structure: of it.
      leaves: positions of its leaves among all that are returned.
      depth: how deep inside it is.
    """

    tree: Any
    structure: Any
    leaves: range
    depth: int


def _subtrees(tree: Any, start: int = 0, depth: int = 0):
    """The returned tree and all trees it is made of."""
    structure = jax.tree.structure(tree)
    yield _Subtree(tree, structure, range(start, start + structure.num_leaves), depth)
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    for child in level[0] if level is not None else ():
        yield from _subtrees(child, start, depth + 1)
        start += len(jax.tree.leaves(child))


def _changes(before: Any, after: Any, where: str) -> list[str]:
    old = jax.tree_util.tree_flatten_with_path(before)[0]
    new = jax.tree.leaves(after)
    found = []
    for (path, leaf), other in zip(old, new, strict=True):
        was, now = _kind(leaf), _kind(other)
        if was != now:
            found.append(f"{where}{jax.tree_util.keystr(path)} was {was} and is {now}")
    return found


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [port_of("", Role.OTHER, leaf).shape for leaf in jax.tree.leaves(tree)]


def _kind(leaf: Any) -> str:
    port = port_of("", Role.OTHER, leaf)
    return f"{port.dtype}[{','.join(map(str, port.shape))}]"


def _resembles(returned: Any, state: Any) -> bool:
    """Whether ``returned`` is meant to be the state: of the same type, and for dicts with keys in common."""
    if type(returned) is not type(state) or isinstance(state, (tuple, list)) or hasattr(state, "dtype"):
        return False
    return not isinstance(state, dict) or bool(set(state) & set(returned))


def _structure_changes(before: Any, after: Any, name: str) -> list[str]:
    old = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(before)[0]}
    new = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(after)[0]}
    found = [f"{name}{path} is missing" for path in sorted(old - new)]
    found += [f"{name}{path} is new" for path in sorted(new - old)]
    return found or [f"the static fields of {name} ({type(before).__name__}) differ"]
