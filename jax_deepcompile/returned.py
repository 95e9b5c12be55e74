"""What a step returns in place of its state.

An optimizer's moments, gradients and averages look like parameters: what has the most leaves is found first, what is
returned nearest to the top goes before what is inside of something else, and nothing is taken twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_deepcompile import errors
from jax_deepcompile.ir.program import Role
from jax_deepcompile.signature import Signature, port_of


def state_outputs(args: tuple, out_shape: Any, signature: Signature) -> tuple[tuple[int, int], ...]:
    """Pairs (flat input, flat output) of the state arguments and what the step returns in their place.

    Those with the most leaves come first: an optimizer's moments look like parameters.
    """
    found: dict[int, _Subtree] = {}
    subtrees = sorted(_subtrees(out_shape), key=lambda sub: sub.depth)

    def free(position: int) -> list[_Subtree]:
        taken = {leaf for sub in found.values() for leaf in sub.leaves}
        wanted = jax.tree.structure(args[position])
        return [sub for sub in subtrees if sub.structure == wanted and taken.isdisjoint(sub.leaves)]

    def most_leaves_first(positions: Sequence[int]) -> list[int]:
        return sorted(positions, key=lambda position: -jax.tree.structure(args[position]).num_leaves)

    for position in most_leaves_first(signature.state):
        candidates = free(position)
        same = [sub for sub in candidates if not _changes(args[position], sub.tree, "")]
        if not candidates:
            _explain_missing(args[position], subtrees, signature, position, out_shape)
        if not same:
            changes = _changes(args[position], candidates[0].tree, signature.name_of(position))
            raise errors.StateChangedError(signature.function, changes)
        found[position] = same[0]
    for position in most_leaves_first(signature.parameters):
        same = [sub for sub in free(position) if not _changes(args[position], sub.tree, "")]
        if same and len(same) >= len(_rivals(args, position, set(signature.parameters) - set(found))):
            found[position] = same[0]
    return tuple(
        (len(jax.tree.leaves(args[:position])) + index, leaf)
        for position in sorted(found)
        for index, leaf in enumerate(found[position].leaves)
    )


def _rivals(args: tuple, position: int, others: Collection[int]) -> list[int]:
    """Those of ``others`` that could be what a step returns in place of argument ``position`` as well."""
    structure = jax.tree.structure(args[position])
    alike = [other for other in others if jax.tree.structure(args[other]) == structure]
    return [other for other in alike if not _changes(args[position], args[other], "")]


def outputs_like_state(args: tuple, out_shape: Any, signature: Signature) -> list[tuple[int, int]]:
    """Pairs like those of ``_match_state`` of everything returned that looks like state, gradients say."""
    pairs = []
    for position in (*signature.state, *signature.parameters):
        structure = jax.tree.structure(args[position])
        start = len(jax.tree.leaves(args[:position]))
        for sub in _subtrees(out_shape):
            if sub.structure == structure and structure.num_leaves > 1 and not _changes(args[position], sub.tree, ""):
                pairs += zip(range(start, start + structure.num_leaves), sub.leaves, strict=True)
    return pairs


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


def _kind(leaf: Any) -> str:
    port = port_of("", Role.OTHER, leaf)
    return f"{port.dtype}[{','.join(map(str, port.shape))}]"


def _explain_missing(state: Any, subtrees, signature: Signature, position: int, out_shape: Any) -> None:
    """Says which of the two it was: state returned in a changed structure, or no state returned at all."""
    name = signature.name_of(position)
    for sub in subtrees:
        if _resembles(sub.tree, state):
            raise errors.StateChangedError(signature.function, _structure_changes(state, sub.tree, name))
    returned = jax.tree.map(_kind, out_shape)
    text = str(returned)
    raise errors.StateNotReturnedError(signature.function, name, text if len(text) < 200 else text[:197] + "...")


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
