"""What the equations of a local program take, before it is compiled: enough to place a prefetch by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.analysis.work import COLLECTIVES, PRODUCTS, fused_away, work_of
from jax_deepcompile.costs.cost_model import CostModel
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.traversal import nested_jaxprs


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
    absent = fused_away(jaxpr)
    return [_time(eqn, absent, mesh, costs) for eqn in open_jaxpr(jaxpr).eqns]


def _time(eqn: Any, absent: set, mesh: MeshAxes, costs: CostModel) -> EquationTime:
    name = eqn.primitive.name
    if bodies := nested_jaxprs(eqn):
        inner = [sum(equation_times(body, mesh, costs), EquationTime()) for body in bodies]
        if name == "cond":
            return max(inner, key=lambda time: time.compute_s + time.network_s)
        return sum(inner, EquationTime()).times(eqn.params.get("length", 1))
    if name in COLLECTIVES:
        return EquationTime(network_s=_collective_s(eqn, mesh, costs))
    work = work_of(eqn)
    if name in PRODUCTS:
        return EquationTime(compute_s=costs.matmul_s(work.matmul_flops, work.dtype, work.size_bytes))
    unread = sum(size_bytes(var) for var in {*variables(eqn.invars), *eqn.outvars} if var in absent)
    moved = max(work.size_bytes - unread, 0.0)
    return EquationTime(compute_s=costs.memory_s(moved) if moved else 0.0)


def _collective_s(eqn: Any, mesh: MeshAxes, costs: CostModel) -> float:
    names = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    names = [names] if isinstance(names, str) else [name for name in names if isinstance(name, str)]
    whole = eqn.outvars if eqn.primitive.name == "all_gather" else eqn.invars
    size = sum(size_bytes(atom) for atom in variables(whole))
    group = mesh.size_of(names)
    return costs.collective_s(COLLECTIVES[eqn.primitive.name], size, group, ranks_per_node(names, mesh, costs))


def ranks_per_node(names: list[str], mesh: MeshAxes, costs: CostModel) -> int:
    """How many members of a group along the axes ``names`` share a node, minor axes being within one."""
    inside = costs.network.gpus_per_node
    ranks = 1
    for name, size in zip(reversed(mesh.names), reversed(mesh.sizes), strict=True):
        ranks *= min(size, inside) if name in names else 1
        inside = max(inside // size, 1)
    return ranks
