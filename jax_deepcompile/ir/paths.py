"""Where the user finds the leaves of a tree, and the tree of modules that they make, to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jax_deepcompile.summary import Branch, size_text

_PART = re.compile(r"\['([^']*)'\]|\[(\w+)\]|\.?(\w+)")
_DEEPEST = 12
"""Deeper modules are one with what is in them."""
_LISTED = 3
"""So many modules that are alike are named."""


def parts_of(path: str) -> list[str]:
    """``state.params['embed']['kernel'].value`` in pieces; the attribute that NNX keeps values in is left out."""
    found = [next(filter(None, each.groups()), "") for each in _PART.finditer(path)]
    return found[:-1] if len(found) > 1 and found[-1] == "value" else found


@dataclass(frozen=True)
class Leaf:
    """One of a tree's leaves.

    Attributes:
      path: where the user finds it.
      bytes: that it takes.
      facts: what there is to say of it.
    """

    path: str
    bytes: int
    facts: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        names = parts_of(self.path) or [self.path]
        return [*names[:_DEEPEST], "/".join(names[_DEEPEST:])] if len(names) > _DEEPEST else names


def tree_of(leaves: Sequence[Leaf], where: str = "") -> Branch:
    """The state's ``leaves`` by the modules that they are in; of modules alike but for names, the first is there.

    Args:
      leaves: each with a path of its own.
      where: their bytes are, such as ``a device``.
    """
    branch = _branch([(leaf.names, leaf) for leaf in leaves], where)
    return branch if branch.name else replace(branch, name="state")


def _branch(leaves: Sequence[tuple[list[str], Leaf]], where: str) -> Branch:
    """All of ``leaves``, with what is left of their paths; called as what it has, where that is alone."""
    inside: dict[str, list[tuple[list[str], Leaf]]] = {}
    for (first, *rest), leaf in leaves:
        inside.setdefault(first, []).append((rest, leaf))
    parts = []
    for part, group in inside.items():
        parts += [Branch(part, leaf.facts) for rest, leaf in group if not rest]
        if deeper := [(rest, leaf) for rest, leaf in group if rest]:
            branch = _branch(deeper, where)
            parts.append(replace(branch, name=f"{part}/{branch.name}" if branch.name else part))
    if len(parts) == 1:
        return parts[0]
    size = size_text(sum(leaf.bytes for _, leaf in leaves))
    return Branch("", (f"{len(leaves)} leaves, {size} {where}".rstrip(),), tuple(_alike(parts)))


def _alike(parts: Sequence[Branch]) -> Iterator[Branch]:
    """``parts``, but of those that differ in their names alone the first, which names the others or says how many."""
    groups: dict[tuple, list[Branch]] = {}
    for part in parts:
        groups.setdefault((part.facts, part.parts), []).append(part)
    for group in groups.values():
        first, more = group[0], len(group) - 1
        if len(group) > _LISTED:
            yield replace(first, facts=(f"and {more} like it", *first.facts))
        else:
            yield replace(first, name=", ".join(part.name for part in group))
