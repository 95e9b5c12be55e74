"""Collectives that XLA makes one of, before a program is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import needs
from jax_deepcompile.costs.streams import Timing
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import axis_names

_DEFAULT_BYTES = 30 * 2**20 + 7
"""``kDefault*CombineThreshold`` of xla/service/gpu/gpu_compiler.cc."""


@dataclass(frozen=True)
class Thresholds:
    """How much XLA combines into one collective.

    Attributes:
      gather_bytes: results of all-gathers.
      scatter_bytes: results of reduce-scatters.
      reduce_bytes: results of all-reduces.
    """

    gather_bytes: int = _DEFAULT_BYTES
    scatter_bytes: int = _DEFAULT_BYTES
    reduce_bytes: int = _DEFAULT_BYTES

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Thresholds:
        """Those among XLA's options, and XLA's own for the rest."""
        names = ("all_gather", "reduce_scatter", "all_reduce")
        return cls(*(int(options.get(f"xla_gpu_{name}_combine_threshold_bytes", _DEFAULT_BYTES)) for name in names))

    def of(self, kind: str) -> int:
        """For collectives of a kind, named as in HLO; 0 for those that XLA leaves alone."""
        known = {"all-gather": self.gather_bytes, "reduce-scatter": self.scatter_bytes, "all-reduce": self.reduce_bytes}
        return known.get(kind, 0)


def combined(jaxpr: Any, timings: Sequence[Timing | None], thresholds: Thresholds) -> list[list[int]]:
    """Positions of equations that XLA combines: groups of two or more.

    As XLA's combiners do, in program order: what is too large by itself is passed over, and a group ends where the next
    of its kind would make it too large or depends on one of it.
    """
    flat = open_jaxpr(jaxpr)
    open_groups: dict[tuple, list[int]] = {}
    groups: list[list[int]] = []
    behind = needs(flat.eqns)
    for place, (eqn, timing) in enumerate(zip(flat.eqns, timings, strict=True)):
        limit = 0 if timing is None else thresholds.of(timing.kind)
        size = sum(map(size_bytes, eqn.outvars))
        if timing is None or size > limit:
            continue
        group = open_groups.setdefault(_alike(eqn), [])
        held = sum(size_bytes(out) for member in group for out in flat.eqns[member].outvars)
        if group and (held + size > limit or any(behind[place] >> member & 1 for member in group)):
            groups.append(group)
            group = open_groups[_alike(eqn)] = []
        group.append(place)
    return [group for group in [*groups, *open_groups.values()] if len(group) > 1]


def _alike(eqn: Any) -> tuple:
    """What collectives must have in common to become one: of reductions also the type of what they sum."""
    gathers = eqn.primitive.name == "all_gather"
    return eqn.primitive.name, axis_names(eqn), "" if gathers else str(eqn.outvars[0].aval.dtype)
