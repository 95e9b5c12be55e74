"""Loops of a local program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.analysis.gathers import is_gather_loop
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.traversal import inside, nested_jaxprs


@dataclass(frozen=True)
class Loop:
    """A ``scan`` of a local program.

    Attributes:
      path: its place: the position of the scan among the scans around it, outermost first.
      eqn: the equation.
    """

    path: tuple[int, ...]
    eqn: Any

    @property
    def name(self) -> str:
        """Such as ``scan.1`` or ``scan.0/scan.2``."""
        return "/".join(f"scan.{position}" for position in self.path)

    @property
    def scan(self) -> Scan:
        return Scan(self.eqn)

    @property
    def body(self) -> Any:
        return self.scan.body

    @property
    def slices(self) -> list:
        """The variables of the body that are slices of stacks."""
        return self.scan.inputs.xs

    @property
    def length(self) -> int:
        return self.scan.length

    @property
    def reverse(self) -> bool:
        return self.scan.reverse


def find_loops(jaxpr: Any, around: tuple[int, ...] = ()) -> Iterator[Loop]:
    """Every scan that computes, outside of other control flow than scans; inner ones before the ones around them."""
    scans = [eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive.name == "scan" and not is_gather_loop(eqn)]
    for position, eqn in enumerate(scans):
        path = (*around, position)
        for body in nested_jaxprs(eqn):
            yield from find_loops(body, path)
        yield Loop(path, eqn)


def reduces_gradients(eqn) -> bool:
    """Whether a loop reduces onto shards."""
    return any(inner.primitive.name == "reduce_scatter" for inner in inside(eqn))


def constants_of(eqn) -> dict:
    """The values of a scan body's own constants."""
    return dict(zip(Scan(eqn).body.constvars, closed_consts(Scan(eqn).closed), strict=True))
