"""The legal ways to compute an equation on a mesh, written down from the meaning of rules alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax_deepcompile.ir.placement import PARTIAL, REPLICATE, MeshAxes, Placement
from jax_deepcompile.partition.rules.base import Dims, Kind, OpRule

MESHES = (MeshAxes(("x",), (8,)), MeshAxes(("x", "y"), (2, 4)))


@dataclass(frozen=True)
class Way:
    """One legal way to compute an equation on a mesh."""

    mesh: MeshAxes
    splits: tuple[tuple[str, ...], ...]
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]


def splittable(rule: OpRule, mesh: MeshAxes = MESHES[0]) -> tuple[list[set[int]], list[set[int]]]:
    """For each operand and each result the dimensions that some way to use the first mesh axis splits."""
    ways = legal_ways(rule, MeshAxes(mesh.names[:1], mesh.sizes[:1]))
    operands = [{way.operands[i].axes[0] for way in ways} - {REPLICATE, PARTIAL} for i in range(len(rule.operands))]
    results = [{way.results[i].axes[0] for way in ways} - {REPLICATE, PARTIAL} for i in range(len(rule.results))]
    return operands, results


def legal_ways(rule: OpRule, mesh: MeshAxes) -> list[Way]:
    """Every combination of one use for each mesh axis, written down from the meaning of rules alone."""
    partial: list[tuple[list[list[str]], list[int], list[list[int]], list[list[int]]]] = [
        ([[] for _ in rule.factors], [factor.size for factor in rule.factors], [], [])
    ]
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        extended = []
        for splits, remaining, operands, results in partial:
            for factor in (None, *range(len(rule.factors))):
                if factor is not None and not _may_split(rule, factor, size, remaining):
                    continue
                left = [count // (size if index == factor else 1) for index, count in enumerate(remaining)]
                named = [[*names, name] if index == factor else names for index, names in enumerate(splits)]
                states = _states(rule, factor)
                extended.append((named, left, [*operands, states[0]], [*results, states[1]]))
            for group in rule.linear:
                placed = [PARTIAL if index in group else REPLICATE for index in range(len(rule.operands))]
                extended.append((splits, remaining, [*operands, placed], [*results, [PARTIAL] * len(rule.results)]))
        partial = extended
    return [
        Way(
            mesh,
            tuple(tuple(names) for names in splits),
            tuple(Placement(states) for states in zip(*operands, strict=True)),
            tuple(Placement(states) for states in zip(*results, strict=True)),
        )
        for splits, _, operands, results in partial
    ]


def _may_split(rule: OpRule, factor: int, size: int, remaining: Sequence[int]) -> bool:
    if rule.factors[factor].kind is Kind.WHOLE or remaining[factor] < 2 or remaining[factor] % size:
        return False
    dims = [factors for value in (*rule.operands, *rule.results) for factors in value if factor in factors]
    return all(remaining[other] == 1 for factors in dims for other in factors[: factors.index(factor)])


def _states(rule: OpRule, factor: int | None) -> tuple[list[int], list[int]]:
    """What splitting ``factor`` over an axis makes of the operands and the results."""
    summed = factor is not None and rule.factors[factor].kind is Kind.SUM

    def state(dims: Dims, absent: int) -> int:
        return next((dim for dim, factors in enumerate(dims) if factor in factors), absent)

    operands = [
        state(dims, PARTIAL if summed and index in rule.addends else REPLICATE)
        for index, dims in enumerate(rule.operands)
    ]
    return operands, [state(dims, PARTIAL if summed else REPLICATE) for dims in rule.results]
