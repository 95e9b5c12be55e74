"""Where a value lives on the mesh: per mesh axis it is whole, split along one dimension, or a partial sum.

The vocabulary is DTensor's (replicate, shard, partial). A dimension split over several axes is split major-first in the
order of the axes, as ``PartitionSpec(("data", "fsdp"))`` does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

REPLICATE = -1
"""Every device along the axis holds the same, whole value."""
PARTIAL = -2
"""The value is the sum of what the devices along the axis hold."""

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or the shape of one."""


def around(mesh: AnyMesh) -> contextlib.AbstractContextManager:
    """What is traced in it is for ``mesh``, whatever mesh the user has set."""
    return jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)


def attached(mesh: Mesh | AbstractMesh) -> bool:
    """Whether programs for ``mesh`` can run in this process."""
    if isinstance(mesh, AbstractMesh):
        return False
    first = mesh.devices.flat[0]
    return any(first is device for device in jax.devices(first.platform)) if _has_backend(first.platform) else False


def _has_backend(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


AxisPlacement = int
"""The dimension split over one axis (>= 0), ``REPLICATE`` or ``PARTIAL``."""


@dataclass(frozen=True)
class MeshAxes:
    """The mesh axes a program is partitioned over, major first.

    Attributes:
      names: one name an axis.
      sizes: devices along each axis.
      virtual: the axes, last in order, along which there are no more devices but the same ones again, later: iterations
        of a loop over parts of the batch.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    virtual: tuple[str, ...] = ()

    @property
    def devices(self) -> MeshAxes:
        """The axes along which there are devices."""
        return self.keep(axis for axis in range(len(self.names)) if not self.is_virtual(axis))

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def size_of(self, names: Iterable[str]) -> int:
        return math.prod(self.sizes[self.names.index(name)] for name in names)

    def is_virtual(self, axis: int) -> bool:
        return self.names[axis] in self.virtual

    def keep(self, axes: Iterable[int]) -> MeshAxes:
        """Only the axes with the indices ``axes``."""
        names = tuple(self.names[axis] for axis in axes)
        sizes = tuple(self.sizes[self.names.index(name)] for name in names)
        return replace(self, names=names, sizes=sizes, virtual=tuple(name for name in self.virtual if name in names))

    def with_loop(self, name: str, length: int) -> MeshAxes:
        """These axes and, behind them, a virtual one."""
        names, sizes = (*self.names, name), (*self.sizes, length)
        return replace(self, names=names, sizes=sizes, virtual=(*self.virtual, name))

    def replicated(self) -> Placement:
        return Placement((REPLICATE,) * len(self.names))

    def place(self, dims: Mapping[int, Sequence[str]], partial: Iterable[str] = ()) -> Placement:
        """The placement that splits dimension ``d`` over the axes ``dims[d]`` and is partial over ``partial``.

        Along an axis of one device everything is whole.
        """
        axes = {name: dim for dim, names in dims.items() for name in names} | dict.fromkeys(partial, PARTIAL)
        if unknown := set(axes) - set(self.names):
            raise KeyError(f"no mesh axis {', '.join(sorted(unknown))} among {', '.join(self.names)}")
        pairs = zip(self.names, self.sizes, strict=True)
        return Placement(tuple(axes.get(name, REPLICATE) if size > 1 else REPLICATE for name, size in pairs))


@dataclass(frozen=True)
class Placement:
    """The placement of one value: an ``AxisPlacement`` for each of the mesh axes."""

    axes: tuple[AxisPlacement, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.axes))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def is_replicated(self) -> bool:
        return all(axis == REPLICATE for axis in self.axes)

    @property
    def is_partial(self) -> bool:
        return PARTIAL in self.axes

    @property
    def is_split(self) -> bool:
        return any(axis >= 0 for axis in self.axes)

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Indices of the axes that split ``dim``, major first."""
        return tuple(index for index, axis in enumerate(self.axes) if axis == dim)

    def replace(self, axis: int, state: AxisPlacement) -> Placement:
        return Placement((*self.axes[:axis], state, *self.axes[axis + 1 :]))

    def shifted(self, by: int) -> Placement:
        """The placement of the same value with ``by`` dimensions inserted (or, negative, removed) in front."""
        return Placement(tuple(axis + by if axis >= 0 else axis for axis in self.axes))

    def without_partial(self) -> Placement:
        return Placement(tuple(REPLICATE if axis == PARTIAL else axis for axis in self.axes))

    def deferring(self, sums: Placement) -> Placement:
        """This placement, but still a partial sum where ``sums`` is one that this would have summed."""
        pairs = zip(self.axes, sums.axes, strict=True)
        return Placement(tuple(PARTIAL if pair == (REPLICATE, PARTIAL) else pair[0] for pair in pairs))

    def fits(self, shape: Sequence[int], mesh: MeshAxes) -> bool:
        """Whether every split dimension exists and divides evenly."""
        parts: dict[int, int] = {}
        for axis, size in zip(self.axes, mesh.sizes, strict=True):
            if axis >= 0:
                parts[axis] = parts.get(axis, 1) * size
        return all(dim < len(shape) and shape[dim] % count == 0 for dim, count in parts.items())

    def on_devices(self, mesh: MeshAxes) -> Placement:
        """The placement over the axes that have devices: what a device holds, of which it may use a part at a time."""
        return Placement(tuple(state for axis, state in enumerate(self.axes) if not mesh.is_virtual(axis)))

    def local_shape(self, shape: Sequence[int], mesh: MeshAxes) -> tuple[int, ...]:
        """The shape of what a device holds."""
        local = list(shape)
        for dim, size in zip(self.on_devices(mesh).axes, mesh.devices.sizes, strict=True):
            if dim >= 0:
                local[dim] //= size
        return tuple(local)

    def spec(self, mesh: MeshAxes) -> PartitionSpec:
        """The ``PartitionSpec`` of a value that is not partial; there are no devices along virtual axes."""
        rank = max(self.axes, default=-1) + 1
        entries = []
        for dim in range(rank):
            names = tuple(mesh.names[index] for index in self.axes_of(dim) if not mesh.is_virtual(index))
            entries.append(None if not names else names[0] if len(names) == 1 else names)
        return PartitionSpec(*entries)

    def describe(self, mesh: MeshAxes) -> str:
        """Text such as ``shard(0: data, fsdp) partial(model)``."""
        dims = sorted({axis for axis in self.axes if axis >= 0})
        parts = [f"shard({dim}: {', '.join(mesh.names[i] for i in self.axes_of(dim))})" for dim in dims]
        if self.is_partial:
            parts.append(f"partial({', '.join(mesh.names[i] for i in self.axes_of(PARTIAL))})")
        return " ".join(parts) or "replicate"
