"""What a user may give for a mesh, and which of its axes do what."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jax_deepcompile import errors
from jax_deepcompile.ir.placement import MeshAxes

AxisNames = str | Sequence[str]


@runtime_checkable
class Cluster(Protocol):
    """GPUs that are not here, such as ``targets.h100(nodes=4)``."""

    @property
    def size(self) -> int: ...

    def make_mesh(self, shape: Sequence[int], names: Sequence[str]) -> Mesh: ...


MeshLike = Mesh | AbstractMesh | Mapping[str, int] | Cluster


@dataclass(frozen=True)
class MeshUse:
    """A mesh and what its axes are used for.

    Attributes:
      mesh: all of its axes automatic; ``shard_map`` makes those of ``axes`` manual.
      axes: the axes the step is partitioned over, in mesh order; any further axis is left to XLA.
      state: the axes state is split over; the batch is over all of ``axes``.
    """

    mesh: Mesh | AbstractMesh
    axes: MeshAxes
    state: tuple[str, ...]

    @property
    def platform(self) -> str:
        """``cuda``, ``cpu`` and so on: of the devices, or of JAX's own where the mesh has none."""
        if isinstance(self.mesh, AbstractMesh):
            return jax.default_backend()
        platform = self.mesh.devices.flat[0].platform
        return "cuda" if platform == "gpu" else platform


def resolve_mesh(mesh: MeshLike | None, fsdp_axes: AxisNames, data_axes: AxisNames):
    """The mesh to use and the use of its axes, of what ``shard`` was given. A single axis is used whatever its name.

    Raises:
      AxisUseError, MeshAxisError: an axis is named for both uses, or the mesh lacks it.
      MeshShapeError, MeshTooLargeError: a shape is none, or asks for more devices than there are.
      TargetUnavailableError: there is no compiler for GPUs that are not here.
    """
    mesh = _with_automatic_axes(_build(mesh, fsdp_axes))
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    state = _names(fsdp_axes)
    if state == ("fsdp",) and "fsdp" not in sizes and len(sizes) == 1:
        state = tuple(sizes)
    data = _names(data_axes)
    asked = {"fsdp_axes": state, "data_axes": () if data_axes == "data" else data}
    for parameter, names in asked.items():
        if missing := [name for name in names if name not in sizes]:
            raise errors.MeshAxisError(missing[0], sizes, parameter)
    if both := [name for name in asked["data_axes"] if name in state]:
        raise errors.AxisUseError(both[0], fsdp_axes, data_axes)
    used = tuple(name for name in sizes if name in (*state, *data))
    axes = MeshAxes(used, tuple(sizes[name] for name in used))
    return MeshUse(mesh, axes, tuple(name for name in used if name in state))


def _names(names: AxisNames) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _build(mesh, fsdp_axes: AxisNames) -> Mesh | AbstractMesh:
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    if isinstance(mesh, Cluster):
        return mesh.make_mesh((mesh.size,), _names(fsdp_axes)[:1])
    shape = dict(mesh) if mesh is not None else {_names(fsdp_axes)[0]: jax.device_count()}
    for axis, size in shape.items():
        if not (isinstance(axis, str) and axis) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise errors.MeshShapeError(shape, axis, size, jax.device_count())
    if not shape:
        raise errors.MeshShapeError(shape, None, None, jax.device_count())
    needed = math.prod(shape.values())
    if needed > jax.device_count():
        raise errors.MeshTooLargeError(shape, needed, jax.device_count(), jax.devices()[0].platform)
    devices = np.array(jax.devices()[:needed]).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape))


def _with_automatic_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """``jax.make_mesh`` makes explicit axes by default; what is explicit here is what partitioning derives."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
