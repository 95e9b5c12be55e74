"""The user's own ``shard_map``: a program for one device already, over axes that ours stand for."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from jax_deepcompile import _jax_compat, errors
from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.ir.primitives import ShardMap
from jax_deepcompile.ir.retrace import run_automatic
from jax_deepcompile.partition.layout import Decision, Nested, Propagate, RegionRule, Request, Run, Step
from jax_deepcompile.partition.rules.registry import REGISTRY

AxisMap = Mapping[str, tuple[str, ...]]
"""For axes of the user's mesh the axes of ours, major first, that stand for them."""


@dataclass(frozen=True)
class ManualRule(RegionRule):
    """``shard_map``: its specs are the placements, its body is run as it is, over our axes.

    What it computes depends on how many blocks there are along each of its axes, not on where they are: an axis of
    ours as long, or several together, stand for one of the user's. Along axes of ours that stand for none all devices
    compute the same. Axes that the mesh leaves to XLA stay axes of a ``shard_map``.
    """

    def decide(self, eqn, request: Request, propagate: Propagate) -> Decision:
        axes = _axis_map(eqn, request.mesh)
        operands = tuple(_placement(spec, axes, request.mesh, eqn) for spec in ShardMap(eqn).in_specs)
        results = tuple(_placement(spec, axes, request.mesh, eqn) for spec in ShardMap(eqn).out_specs)
        return Decision(Nested(self), operands, results)

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        axes, around = _axis_map(step.eqn, mesh), jax.sharding.get_abstract_mesh().shape
        region = ShardMap(step.eqn)
        for name in sorted(region.axes - axes.keys()):
            if around.get(name) != region.sizes[name]:
                raise _refused(step.eqn, name, mesh)
        return run_automatic(step.eqn, operands, axes)


def _axis_map(eqn, mesh: MeshAxes) -> AxisMap:
    """Axes of the user's that axes of ours stand for; those of the same name and size first."""
    ours, theirs = mesh.devices, ShardMap(eqn).sizes
    wanted = [name for name in theirs if name in ShardMap(eqn).axes]
    same = {name: (name,) for name in wanted if name in ours.names and ours.size_of((name,)) == theirs[name]}
    free = [name for name in ours.names if name not in same]
    found: dict[str, tuple[str, ...]] = dict(same)
    for name in [name for name in wanted if name not in same]:
        runs = [free[start:stop] for start, stop in itertools.combinations(range(len(free) + 1), 2)]
        fitting = [run for run in ([], *runs) if ours.size_of(run) == theirs[name]]
        if fitting:
            found[name] = tuple(fitting[0])
            free = [axis for axis in free if axis not in fitting[0]]
        elif name in ours.names:
            raise _refused(eqn, name, mesh)
    return found


def _placement(spec: PartitionSpec, axes: AxisMap, mesh: MeshAxes, eqn) -> Placement:
    dims = {}
    for dim, entry in enumerate(spec):
        listed = entry if isinstance(entry, tuple) else (entry,)
        dims[dim] = [ours for name in listed for ours in axes.get(name, ())]
        if dims[dim] != sorted(dims[dim], key=mesh.names.index):
            raise errors.ManualAxesOrderError(str(spec), mesh.names, _jax_compat.user_line(eqn))
    return mesh.place(dims)


def _refused(eqn, name: str, mesh: MeshAxes) -> errors.ManualAxisError:
    ours = dict(zip(mesh.devices.names, mesh.devices.sizes, strict=True))
    return errors.ManualAxisError(name, ShardMap(eqn).sizes, ours, _jax_compat.user_line(eqn))


REGISTRY.register_region("shard_map", ManualRule())
