"""Loops of a local program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.analysis.gathers import is_gather_loop
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.traversal import contains, nested_jaxprs

Path: TypeAlias = tuple[int, ...]
"""Where a loop is: the position of its scan among those around it, outermost first; () is outside of loops."""


@dataclass(frozen=True)
class Loop:
    """A ``scan`` of a local program.

    Attributes:
      path: its place.
      eqn: the equation.
      name: what plans call it, such as ``layers @backward``.
    """

    path: Path
    eqn: Any
    name: str

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

    def is_inside(self, other: Loop) -> bool:
        """Whether it runs in every iteration of ``other``."""
        return self.path != other.path and self.path[: len(other.path)] == other.path


def find_loops(program: Program) -> Iterator[Loop]:
    """Every scan that computes, outside of other control flow than scans; inner ones before the ones around them."""
    for path, eqn in loops_in(program.jaxpr):
        yield Loop(path, eqn, program.loop_names.get(path) or "/".join(f"scan.{place}" for place in path))


def loops_in(jaxpr: Any, around: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and equation of each of the loops in ``jaxpr``, as ``find_loops`` orders them."""
    for position, eqn in enumerate(computing_scans(jaxpr)):
        path = (*around, position)
        for body in nested_jaxprs(eqn):
            yield from loops_in(body, path)
        yield path, eqn


def computing_scans(jaxpr: Any) -> list:
    """The scans among the equations of ``jaxpr`` that do more than gather."""
    return [eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive.name == "scan" and not is_gather_loop(eqn)]


def has_layers_with_loops(program: Program) -> bool:
    """Whether several loops, forward and backward, follow one another in one place: layers written one by one have
    them, over time steps or over parts of a sequence."""
    beside = Counter(loop.path[:-1] for loop in find_loops(program))
    return max(beside.values(), default=0) >= 4


def reduces_gradients(eqn) -> bool:
    """Whether a loop reduces onto shards."""
    return contains(eqn, {"reduce_scatter"})


def constants_of(eqn) -> dict:
    """The values of a scan body's own constants."""
    return dict(zip(Scan(eqn).body.constvars, closed_consts(Scan(eqn).closed), strict=True))
