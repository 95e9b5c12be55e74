"""Which devices take part in a collective together, from each of the forms in which XLA prints it."""

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from jax_deepcompile import errors
from jax_deepcompile.hlo.types import Instruction, Module, parse_index

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, *device_ids=\((.*?)\))? *\{([^}]*)\}")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+)|=(\d+))?")


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups of one collective: device numbers; all groups are of one length."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Devices in a group."""
        return max(map(len, self.groups), default=1)

    @cached_property
    def _per_node(self) -> dict[int, int]:
        return {}

    def ranks_per_node(self, gpus_per_node: int) -> int:
        """The most devices of one group that share a node, where devices are numbered node by node."""
        if gpus_per_node not in self._per_node:
            counts = [np.bincount(np.array(group) // gpus_per_node).max() for group in self.groups if group]
            self._per_node[gpus_per_node] = int(max(counts, default=1))
        return self._per_node[gpus_per_node]


def of(module: Module, collective: Instruction) -> ReplicaGroups:
    """The groups of a collective operation; the pairs of sender and receiver for a ``collective-permute``."""
    pairs = collective.attribute("source_target_pairs")
    if pairs is not None:
        return parse(pairs, module.device_count)
    found = re.search(r"(?:^|, )replica_groups=", collective.attributes)
    return parse(collective.attributes[found.end() :] if found else "{}", module.device_count)


@lru_cache(maxsize=10_000)
def parse(text: str, device_count: int) -> ReplicaGroups:
    """Reads ``{{0,1},{2,3}}``, ``[2,2]<=[4]`` or ``mesh['a'=2,'b'=2] {'b'}``; ``{}`` is everyone.

    >>> parse("[2,2]<=[2,2]T(1,0)", 4).groups
    ((0, 2), (1, 3))
    >>> parse("mesh['a'=2,'b'=2] {'b'}", 4).groups
    ((0, 1), (2, 3))
    """
    if text.startswith("mesh"):
        return ReplicaGroups(_mesh(text))
    if text.startswith("["):
        return ReplicaGroups(_rows(_iota(text)))
    if text.startswith("{{"):
        listed = re.findall(r"\{([\d,]+)\}", text[1 : text.index("}}") + 1])
        return ReplicaGroups(tuple(parse_index(group) for group in listed))
    return ReplicaGroups((tuple(range(device_count)),))


def _iota(text: str) -> np.ndarray:
    found = _IOTA.match(text)
    if found is None:
        raise errors.MalformedHloError(0, f"not replica groups: {text[:80]}")
    shape, source, order = found.groups()
    devices = np.arange(math.prod(parse_index(source))).reshape(parse_index(source))
    return (devices.transpose(parse_index(order)) if order else devices).reshape(parse_index(shape))


def _mesh(text: str) -> tuple[tuple[int, ...], ...]:
    """Groups along some axes of a mesh, or of parts of axes: ``'a':(2)4`` is the part of size 4 after 2 of ``a``."""
    found = _MESH.match(text)
    if found is None:
        raise errors.MalformedHloError(0, f"not replica groups: {text[:80]}")
    mesh, ids, over = found.groups()
    sizes = {name: int(size) for name, _, _, size in _AXIS.findall(mesh)}
    wanted = [(name, int(before or 1), int(size or sizes[name])) for name, before, size, _ in _AXIS.findall(over)]
    shape: list[int] = []
    grouped: list[bool] = []
    for name, size in sizes.items():
        own = [(start, start * part) for axis, start, part in wanted if axis == name]
        cuts = sorted({1, size, *(cut for ends in own for cut in ends)})
        for start, end in pairwise(cuts):
            shape.append(end // start)
            grouped.append(any(axis == name and first <= start < first * part for axis, first, part in wanted))
    numbers = np.arange(math.prod(shape))
    if ids:
        whole = ids if "<=" in ids else f"[{len(numbers)}]<={ids}"
        numbers = _iota(whole) if ids.startswith("[") else np.array(parse_index(ids))
    kept = [dim for dim, is_grouped in enumerate(grouped) if not is_grouped]
    moved = numbers.reshape(shape).transpose([*kept, *(dim for dim, is_grouped in enumerate(grouped) if is_grouped)])
    return _rows(moved.reshape(-1, math.prod(size for size, yes in zip(shape, grouped, strict=True) if yes)))


def _rows(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(device) for device in group) for group in groups)
