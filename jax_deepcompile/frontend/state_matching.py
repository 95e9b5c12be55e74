"""What a step returns in place of its state.

An optimizer's moments, gradients and averages look like parameters: what has the most leaves is found first, what is
returned nearest to the top goes before what is inside of something else, and nothing is matched twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jax_deepcompile import errors
from jax_deepcompile.frontend.call import holds_optimizer
from jax_deepcompile.frontend.containers import kind_of
from jax_deepcompile.frontend.evaluation import evaluates
from jax_deepcompile.frontend.signature import Signature, port_of, structure_changes
from jax_deepcompile.ir.lineage import Lineage
from jax_deepcompile.ir.program import Role


@dataclass(frozen=True)
class Returned:
    """What a step returns: its shape, as a pytree, and what its leaves come from.

    Attributes:
      written: the step's jaxpr, with what it computes and does not return.
    """

    shape: Any
    lineage: Lineage
    written: Any


def state_outputs(args: tuple, returned: Returned, signature: Signature) -> tuple[tuple[int, int], ...]:
    """Pairs (flat input, flat output) of the state arguments and what the step returns in their place.

    There are none of a step that evaluates: it returns nothing of what may be state, and makes no new values of it.

    Raises:
      StateNotReturnedError, StateChangedError: state is not returned as it came.
    """
    matches = _Matches(args, returned)
    if signature.objects and returned.shape[0] is None:  # nothing in them is another value
        signature = replace(signature, state=signature.state[1:])
    for position in matches.most_leaves_first((*signature.state, *signature.optimizers)):
        if not matches.match(position):
            matches.refuse_changed(position, signature)
            if position in signature.state:
                matches.refuse_missing(position, signature)
    if signature.optimizers and not matches.has_any(signature.optimizers):
        if signature.state or not matches.none_of(signature.divided) or not _evaluates(args, returned, signature):
            matches.refuse_missing(signature.optimizers[0], signature)
        return ()
    guessed = (*signature.networks, *signature.parameters)
    matches.match_carried(signature.networks)
    matches.match_carried(signature.parameters, all_of_a_kind=True)
    for position in signature.networks:
        if not matches.same(position):
            matches.refuse_changed(position, signature, carried=matches.has_any(guessed))
    is_missing = signature.networks and not matches.has_any(guessed) and not matches.same(signature.networks[0])
    if is_missing and (signature.optimizers or not _evaluates(args, returned, signature)):
        matches.refuse_missing(signature.networks[0], signature)
    return matches.pairs()


def _evaluates(args: tuple, returned: Returned, signature: Signature) -> bool:
    starts = [len(jax.tree.leaves(args[:position])) for position in range(len(args) + 1)]
    state = [leaf for position in signature.divided for leaf in range(starts[position], starts[position + 1])]
    return evaluates(returned.written, state)


def returned_anew(args: tuple, returned: Returned, optimizers: Sequence[int], others: Sequence[int]) -> set[int]:
    """Positions of those of ``others`` that the step returns anew, beside ``optimizers``, which it may return too."""
    matches = _Matches(args, returned)
    for position in matches.most_leaves_first(optimizers):
        matches.match(position)
    matches.match_carried(others)
    return {position for position in others if matches.has_any([position])}


def outputs_like_state(
    args: tuple, returned: Returned, signature: Signature, parts: bool = False
) -> list[tuple[int, int]]:
    """Pairs like those of ``state_outputs`` of everything returned that looks like state, gradients say.

    Args:
      parts: also of what looks like a part of it.
    """
    pairs = []
    made = [sub for sub in _subtrees(returned.shape) if sub.structure.num_leaves > 1]
    for position in signature.divided:
        whole, *inside = _subtrees(args[position], len(jax.tree.leaves(args[:position])))
        for part in (whole, *inside) if parts else (whole,):
            for sub in made:
                if sub.structure == part.structure and not _changes(part.tree, sub.tree):
                    pairs += zip(part.leaves, sub.leaves, strict=True)
    return pairs


class _Matches:
    """What has been found so far of the state in what the step returns."""

    def __init__(self, args: tuple, returned: Returned) -> None:
        self._args = args
        self._returned = returned
        self._subtrees = sorted(_subtrees(returned.shape), key=lambda sub: sub.depth)
        self._matched: dict[int, _Subtree] = {}

    def most_leaves_first(self, positions: Sequence[int]) -> list[int]:
        return sorted(positions, key=lambda position: -jax.tree.structure(self._args[position]).num_leaves)

    def has_any(self, positions: Sequence[int]) -> bool:
        return not self._matched.keys().isdisjoint(positions)

    def none_of(self, positions: Sequence[int]) -> bool:
        """Whether nothing that is returned is or could be the new value of any."""
        return not self.has_any(positions) and not any(map(self.same, positions))

    def match(self, position: int) -> bool:
        """Finds the argument's new value: what carries it on, or else what looks like it."""
        same = self.same(position)
        if same:
            self._matched[position] = (self._carrying(position) or same)[0]
        return bool(same)

    def match_carried(self, positions: Sequence[int], all_of_a_kind: bool = False) -> None:
        """Finds the new values of those arguments that something carries on.

        With ``all_of_a_kind`` not of those of which there are more alike than values to carry them on: a penalty that
        keeps parameters near others is in their gradients.
        """
        for position in self.most_leaves_first(positions):
            carried = self._carrying(position)
            alike = [other for other in positions if other not in self._matched and self._are_alike(position, other)]
            rivals = [found for other in alike if (found := self._carrying(other))]
            values = {sub.leaves for found in rivals for sub in found}
            if carried and not (all_of_a_kind and len(values) < len(rivals)):
                self._matched[position] = carried[0]

    def refuse_changed(self, position: int, signature: Signature, carried: bool = False) -> None:
        """Raises StateChangedError if what is left looks like the argument's new value, but for shapes and dtypes.

        With ``carried`` only if it carries the argument on.
        """
        if position in self._matched:
            return
        argument, path_of = self._args[position], partial(signature.path_of, position)
        for sub in self._free(position):
            changes = _changes(argument, sub.tree, path_of)
            is_new = len(sub.leaves) > 1 or _shapes(sub.tree) == _shapes(argument)
            if changes and (self._carries_on(sub, position) if carried else is_new):
                raise errors.StateChangedError(signature.function, changes)
        for sub in () if carried else self._left():
            if _resembles(sub.tree, argument) and sub.structure != jax.tree.structure(argument):
                raise errors.StateChangedError(signature.function, structure_changes(argument, sub.tree, path_of))

    def refuse_missing(self, position: int, signature: Signature) -> None:
        text = str(jax.tree.map(_kind, self._returned.shape))
        shown = text if len(text) < 200 else text[:197] + "..."
        raise errors.StateNotReturnedError(signature.function, signature.name_of(position), shown)

    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (self._start(position) + index, leaf)
            for position in sorted(self._matched)
            for index, leaf in enumerate(self._matched[position].leaves)
        )

    def _start(self, position: int) -> int:
        return len(jax.tree.leaves(self._args[:position]))

    def _left(self) -> list[_Subtree]:
        matched = {leaf for sub in self._matched.values() for leaf in sub.leaves}
        return [sub for sub in self._subtrees if matched.isdisjoint(sub.leaves)]

    def _free(self, position: int) -> list[_Subtree]:
        wanted = jax.tree.structure(self._args[position])
        return [sub for sub in self._left() if sub.structure == wanted]

    def same(self, position: int) -> list[_Subtree]:
        """What is left that could be the argument's new value, such as its gradient."""
        return [sub for sub in self._free(position) if not _changes(self._args[position], sub.tree)]

    def _carrying(self, position: int) -> list[_Subtree]:
        return [sub for sub in self.same(position) if self._carries_on(sub, position)]

    def _are_alike(self, position: int, other: int) -> bool:
        mine, theirs = self._args[position], self._args[other]
        return jax.tree.structure(mine) == jax.tree.structure(theirs) and not _changes(mine, theirs)

    def _carries_on(self, sub: _Subtree, position: int) -> bool:
        """Whether most of the argument's arrays, or numbers if it has no arrays, live on in ``sub``.

        Gradients may be all that is like parameters, but not what is like parameters and an optimizer's state: of that
        some arrays are enough, as an optimizer may keep what it was given last.
        """
        leaves = _shapes(self._args[position])
        counted = [index for index, shape in enumerate(leaves) if shape] or list(range(len(leaves)))
        start, carried = self._start(position), self._returned.lineage.carried
        kept = sum(carried[sub.leaves[index]] >> (start + index) & 1 for index in counted)
        some = kept > 0 and holds_optimizer(self._args[position])
        return some or 2 * kept > len(counted) or not counted


@dataclass(frozen=True)
class _Subtree:
    """A part of what a step returns: positions of its leaves among all that are returned, and how deep inside it is."""

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


def _changes(before: Any, after: Any, path_of: Callable[[tuple], str] = jax.tree_util.keystr) -> list[str]:
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    kinds = [(path, _kind(leaf), _kind(other)) for (path, leaf), other in pairs]
    return [f"{path_of(path)} was {was} and is {now}" for path, was, now in kinds if was != now]


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [port_of("", Role.OTHER, leaf).shape for leaf in jax.tree.leaves(tree)]


def _kind(leaf: Any) -> str:
    port = port_of("", Role.OTHER, leaf)
    return f"{port.dtype}[{','.join(map(str, port.shape))}]"


def _resembles(returned: Any, state: Any) -> bool:
    """Whether ``returned`` is meant to be the state: of the same type, and for dicts with keys in common."""
    if kind_of(returned) is not kind_of(state) or isinstance(state, (tuple, list)) or hasattr(state, "dtype"):
        return False
    return not isinstance(state, dict) or bool(set(state) & set(returned))
