"""Equations that place their operands themselves: barriers, the user's own constraints, printing."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex
from jax.sharding import NamedSharding

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.ir.primitives import Call, ShardMap
from jax_deepcompile.ir.retrace import constrain_automatic
from jax_deepcompile.ir.traversal import located_equations
from jax_deepcompile.partition.layout import Decision, Layout, Nested, Propagate, RegionRule, Request, Run, Step
from jax_deepcompile.partition.reshard import axis_position
from jax_deepcompile.partition.rules.base import OpRule, replicated_rule
from jax_deepcompile.partition.rules.registry import REGISTRY, rule

_CONSTRAINTS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}
"""The parameter that has the sharding, by the name of the primitive."""


@dataclass(frozen=True)
class BarrierRule(RegionRule):
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
class ConstraintRule(RegionRule):
    """``sharding_constraint``, ``reshard``: axes of ours are obeyed, automatic axes are passed on to XLA.

    Those that the mesh does not have are left out: how values are divided is derived here.
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


def unmet_annotations(layout: Layout) -> Iterator[tuple[Equation, str]]:
    """How the user wrote that values are divided, and where, if ``layout`` divides them otherwise.

    A value that is divided as asked wherever it is used is divided as asked.
    """
    used: dict[Any, list[Placement]] = defaultdict(list)
    inside = [pair for step in layout.steps for pair in zip(step.eqn.invars, step.fetches, strict=True)]
    for atom, fetch in [*inside, *zip(layout.jaxpr.outvars, layout.outputs, strict=True)]:
        if isinstance(atom, jex.Var):
            used[atom].append(fetch.target)
    for step in layout.steps:
        for asked, var, held in zip(_asked(step.eqn), step.eqn.outvars, step.results, strict=False):
            if asked is None or _is_met(asked, held, layout.mesh):
                continue
            if not all(_is_met(asked, use, layout.mesh) for use in used[var] or [held]):
                yield step.eqn, _text(asked)
        if step.eqn.primitive.name == "shard_map":
            yield from _unmet_inside(step.eqn, layout.mesh)


def _unmet_inside(eqn: Any, mesh: MeshAxes) -> Iterator[tuple[Equation, str]]:
    """Of the body of a ``shard_map``, along axes that it leaves to XLA: our mesh may have none of that name."""
    for inner, located in located_equations(ShardMap(eqn).closed, eqn):
        for asked in _asked(inner):
            if asked is not None and not _is_met(asked, mesh.replicated(), mesh):
                yield located, _text(asked)


def _asked(eqn: Equation) -> Sequence[Any]:
    """For each result the division that the user wrote for it; of a ``jit`` for each operand before."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CONSTRAINTS:
        return [params[_CONSTRAINTS[name]]]
    given = params["devices"] if name == "device_put" else (*Call(eqn).in_shardings, *Call(eqn).out_shardings)
    return [each if isinstance(each, jax.sharding.Sharding | jax.Device) else None for each in given]


def _text(asked: Any) -> str:
    return str(asked.spec if isinstance(asked, NamedSharding) else asked)


def _is_met(sharding: Any, held: Placement, mesh: MeshAxes) -> bool:
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
    return [each if isinstance(each, tuple) else (each,) if isinstance(each, str) else () for each in sharding.spec]


@dataclass(frozen=True)
class PrintRule(RegionRule):
    """``jax.debug.print`` and ``jax.debug.callback``: whole values, from the first device alone."""

    def decide(self, eqn, request: Request, propagate: Propagate) -> Decision:
        whole = request.mesh.replicated()
        return Decision(Nested(self), (whole,) * len(eqn.invars), (whole,) * len(eqn.outvars))

    def emit(self, step: Step, operands, run: Run, mesh: MeshAxes):
        eqn = step.eqn
        params = eqn.primitive.get_bind_params(eqn.params)

        def call(*values):
            eqn.primitive.bind(*values, **params)

        lax.cond(axis_position(mesh.devices.names, mesh) == 0, call, lambda *values: None, *operands)
        return []


@rule("pure_callback")
def host_function(eqn: Equation) -> OpRule:
    """Python's function is of whole arrays: each device calls it on them, as what is pure may be called often."""
    return replicated_rule(eqn, reported="a function on the host is of whole arrays")


REGISTRY.register_region("optimization_barrier", BarrierRule())
REGISTRY.register_region("device_put", TransferRule())
for _name, _param in _CONSTRAINTS.items():
    REGISTRY.register_region(_name, ConstraintRule(_param))
REGISTRY.register_region("debug_print", PrintRule())
REGISTRY.register_region("debug_callback", PrintRule())
