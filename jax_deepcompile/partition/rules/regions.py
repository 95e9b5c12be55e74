"""Equations that place their operands themselves: barriers, the user's own constraints, printing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import NamedSharding

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.placement import REPLICATE, MeshAxes, Placement
from jax_deepcompile.ir.retrace import constrain_automatic
from jax_deepcompile.partition.layout import Decision, Nested, Propagate, RegionRule, Request, Run, Step
from jax_deepcompile.partition.reshard import axis_position
from jax_deepcompile.partition.rules.registry import REGISTRY


class SingleTrip(RegionRule):
    def trip_count(self, eqn: Equation) -> int:
        return 1

    def batch(self, eqn: Equation, operands: Sequence[bool]) -> list[bool]:
        return [any(operands)] * len(eqn.outvars)


@dataclass(frozen=True)
class BarrierRule(SingleTrip):
    """``optimization_barrier``: every value passes as it is, partial sums included."""

    def batch(self, eqn, operands):
        return list(operands)

    def hints(self, eqn, results, through):
        return results

    def decide(self, eqn, request: Request, propagate: Propagate) -> Decision:
        return Decision(Nested(self), request.operands, request.operands)

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        return lax.optimization_barrier(tuple(operands))


@dataclass(frozen=True)
class TransferRule(BarrierRule):
    """``device_put``: every device moves its block between memories; moves between devices are ours to decide."""

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        spaces = step.eqn.params["devices"]
        return [
            jax.device_put(value, space) if isinstance(space, jax.memory.Space) else value
            for value, space in zip(operands, spaces, strict=True)
        ]


@dataclass(frozen=True)
class ConstraintRule(SingleTrip):
    """``sharding_constraint``, ``reshard``: axes of ours are obeyed, automatic axes are passed on to XLA.

    Those that the mesh does not have are left out: how values are divided is derived here.

    Attributes:
      param: the parameter that the sharding is in.
    """

    param: str

    def decide(self, eqn, request: Request, propagate: Propagate) -> Decision:
        (held,) = request.operands
        placement = held.without_partial()
        shape = eqn.invars[0].aval.shape
        for dim, names in enumerate(_entries(eqn.params[self.param])):
            for name in names:
                if name in request.mesh.names:
                    asked = placement.replace(request.mesh.names.index(name), dim)
                    placement = asked if asked.fits(shape, request.mesh) else placement
        return Decision(Nested(self), (placement,), (placement,))

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        return [constrain_automatic(operands[0], step.eqn.params[self.param])]


def unmet_annotations(step: Step, mesh: MeshAxes) -> list[str]:
    """How the user wrote that values are divided, where the equation leaves them divided otherwise over ``mesh``."""
    rule, params = step.how.rule, step.eqn.params
    if isinstance(rule, ConstraintRule):
        asked = [params[rule.param]]
    elif isinstance(rule, TransferRule):
        asked = [each if isinstance(each, jax.sharding.Sharding) else None for each in params["devices"]]
    else:
        return []
    pairs = zip(asked, step.results, strict=True)
    unmet = [sharding for sharding, held in pairs if sharding is not None and not _is_met(sharding, held, mesh)]
    return [str(sharding.spec if isinstance(sharding, NamedSharding) else sharding) for sharding in unmet]


def _is_met(sharding: jax.sharding.Sharding, held: Placement, mesh: MeshAxes) -> bool:
    """Whether each axis named divides the value, of ours or by XLA; where none is named, whether it is whole."""
    if not isinstance(sharding, NamedSharding):
        return False
    devices, sizes, held = mesh.devices, sharding.mesh.shape, held.on_devices(mesh)
    by_xla = all(sizes.get(name) == size for name, size in zip(devices.names, devices.sizes, strict=True))
    asked = [(dim, name) for dim, names in enumerate(_entries(sharding)) for name in names if sizes[name] > 1]
    ours = [(dim, name) for dim, name in asked if name in devices.names]
    if not asked:
        return held.is_replicated
    return (by_xla or ours == asked) and all(held.axes[devices.names.index(name)] == dim for dim, name in ours)


def _entries(sharding) -> list[tuple[str, ...]]:
    """The mesh axes of every dimension that ``sharding`` mentions."""
    if not isinstance(sharding, NamedSharding):
        return []
    return [
        entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else () for entry in sharding.spec
    ]


@dataclass(frozen=True)
class PrintRule(SingleTrip):
    """``jax.debug.print`` and ``jax.debug.callback``: whole values, from the first device alone."""

    def decide(self, eqn, request: Request, propagate: Propagate) -> Decision:
        whole = Placement((REPLICATE,) * len(request.mesh.names))
        return Decision(Nested(self), (whole,) * len(eqn.invars), (whole,) * len(eqn.outvars))

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        eqn = step.eqn
        params = eqn.primitive.get_bind_params(eqn.params)

        def call(*values):
            eqn.primitive.bind(*values, **params)

        lax.cond(axis_position(mesh.devices.names, mesh) == 0, call, lambda *values: None, *operands)
        return []


REGISTRY.register_region("optimization_barrier", BarrierRule())
REGISTRY.register_region("device_put", TransferRule())
REGISTRY.register_region("sharding_constraint", ConstraintRule("sharding"))
REGISTRY.register_region("reshard", ConstraintRule("dst_sharding"))
REGISTRY.register_region("debug_print", PrintRule())
REGISTRY.register_region("debug_callback", PrintRule())
