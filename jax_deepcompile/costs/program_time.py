"""What the equations of a local program take, before it is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.kernels import kernels_of
from jax_deepcompile.analysis.work import alone_bytes, vector_flops, work_of
from jax_deepcompile.costs.collective_bytes import sent_bytes
from jax_deepcompile.costs.combining import Thresholds, combined
from jax_deepcompile.costs.cost_model import CostModel, Direction
from jax_deepcompile.costs.streams import Part, Stream, Timing
from jax_deepcompile.ir.memory import is_on_host, size_bytes
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.primitives import COLLECTIVES, PRODUCTS, Scan, axis_names
from jax_deepcompile.ir.traversal import bodies


@dataclass(frozen=True)
class EquationTime:
    """One equation's share of the step.

    Attributes:
      compute_s: seconds of kernels.
      network_s: seconds of collectives.
    """

    compute_s: float = 0.0
    network_s: float = 0.0

    def __add__(self, other: EquationTime) -> EquationTime:
        return EquationTime(self.compute_s + other.compute_s, self.network_s + other.network_s)

    def times(self, count: int) -> EquationTime:
        """Of ``count`` such equations."""
        return EquationTime(self.compute_s * count, self.network_s * count)


def equation_times(jaxpr: Any, mesh: MeshAxes, costs: CostModel) -> list[EquationTime]:
    """The time of every equation, those inside loops and branches summed up.

    Args:
      jaxpr: in the local view.
      mesh: the sizes of its axes.
      costs: what things take.
    """
    pairs = zip(open_jaxpr(jaxpr).eqns, timings_of(jaxpr, mesh, costs), strict=True)
    return [_nested(eqn, mesh, costs) if timing is None else _of(timing) for eqn, timing in pairs]


def timings_of(jaxpr: Any, mesh: MeshAxes, costs: CostModel) -> list[Timing | None]:
    """How every equation runs; None for those that run other jaxprs.

    Equations that are fused take no time, but for the last of their kernel, and random bits.
    """
    flat = open_jaxpr(jaxpr)
    moved = kernels_of(flat).moved_bytes
    return [
        None if bodies(eqn) else timing_of(eqn, size, mesh, costs) for eqn, size in zip(flat.eqns, moved, strict=True)
    ]


def combined_timings(
    jaxpr: Any, timings: Sequence[Timing | None], mesh: MeshAxes, costs: CostModel, thresholds: Thresholds
) -> list[Timing | None]:
    """``timings`` where the first of the collectives that XLA combines takes what it takes alone, and the others only
    what they make it longer."""
    eqns, found = open_jaxpr(jaxpr).eqns, list(timings)
    for group in combined(jaxpr, timings, thresholds):
        joined = 0
        for place in group:
            timing = found[place] = collective_of(eqns[place], mesh, costs, joined)
            joined += timing.bytes
    return found


def timing_of(eqn: Any, moved_bytes: int, mesh: MeshAxes, costs: CostModel) -> Timing:
    """How an equation runs that moves ``moved_bytes`` to and from memory, if it ends a kernel."""
    name = eqn.primitive.name
    if name in COLLECTIVES:
        return collective_of(eqn, mesh, costs)
    if name in PRODUCTS:
        work = work_of(eqn)
        kernel, part = costs.matmul((work,), alone_bytes(eqn)), Part.of((work,), str(eqn.source_info.name_stack))
        return Timing(Stream.COMPUTE, kernel.seconds, name, is_memory_bound=kernel.is_memory_bound, part=part)
    if name == "device_put":
        return _copy(eqn, costs)
    part = Part.of((), str(eqn.source_info.name_stack))
    if flops := vector_flops(eqn):
        kernel = costs.vector(flops, moved_bytes)
        return Timing(Stream.COMPUTE, kernel.seconds, name, is_memory_bound=kernel.is_memory_bound, part=part)
    seconds = costs.memory_s(moved_bytes) if moved_bytes else 0.0
    return Timing(Stream.COMPUTE, seconds, name, is_memory_bound=True, part=part)


def collective_of(eqn: Any, mesh: MeshAxes, costs: CostModel, joined_bytes: int = 0) -> Timing:
    """How a collective runs that is part of one with ``joined_bytes`` of others."""
    names = [name for name in axis_names(eqn) if isinstance(name, str)]
    whole = eqn.outvars if eqn.primitive.name == "all_gather" else eqn.invars
    size = sum(size_bytes(atom) for atom in variables(whole))
    group, kind = mesh.size_of(names), COLLECTIVES[eqn.primitive.name]
    ranks = ranks_per_node(names, mesh, costs)
    seconds = costs.collective_s(kind, joined_bytes + size, group, ranks)
    if joined_bytes:
        seconds -= costs.collective_s(kind, joined_bytes, group, ranks)
    sent = sent_bytes(kind, size, group)
    return Timing(Stream(kind), seconds, kind, size, sent_bytes=sent, taken=costs.taken_by_collective(sent, seconds))


def ranks_per_node(names: list[str], mesh: MeshAxes, costs: CostModel) -> int:
    """How many members of a group along the axes ``names`` share a node, minor axes being within one."""
    inside = costs.network.gpus_per_node
    ranks = 1
    for name, size in zip(reversed(mesh.names), reversed(mesh.sizes), strict=True):
        ranks *= min(size, inside) if name in names else 1
        inside = max(inside // size, 1)
    return ranks


def _nested(eqn: Any, mesh: MeshAxes, costs: CostModel) -> EquationTime:
    inner = [sum(equation_times(body, mesh, costs), EquationTime()) for body in bodies(eqn)]
    if eqn.primitive.name == "cond":
        return max(inner, key=lambda time: time.compute_s + time.network_s)
    return sum(inner, EquationTime()).times(Scan(eqn).length if eqn.primitive.name == "scan" else 1)


def _of(timing: Timing) -> EquationTime:
    if timing.stream is Stream.COMPUTE:
        return EquationTime(compute_s=timing.seconds)
    return EquationTime() if timing.stream.is_copy else EquationTime(network_s=timing.seconds)


def _copy(eqn: Any, costs: CostModel) -> Timing:
    """A ``device_put``: one that changes no memory is no work."""
    pairs = list(zip(eqn.invars, eqn.outvars, strict=True))
    to_host = sum(size_bytes(out) for operand, out in pairs if is_on_host(out) and not is_on_host(operand))
    from_host = sum(size_bytes(out) for operand, out in pairs if is_on_host(operand) and not is_on_host(out))
    if to_host:
        return costs.copy(to_host, Direction.TO_HOST)
    if from_host:
        return costs.copy(from_host, Direction.FROM_HOST)
    return Timing(Stream.COMPUTE, 0.0, "copy")
