"""Where a value comes from: through equations, into loops and branches, and out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.ir.primitives import Cond, Scan, While


class Scope:
    """Where the variables of one jaxpr come from.

    Attributes:
      jaxpr: the jaxpr, closed.
      constants: values of its constants.
      definitions: for each computed variable its equation, and which of the results it is.
      passed: for inputs of a loop's body or a branch the scope outside, what it passes, and how many leading dimensions
        the loop takes off. What a loop carries is not known.
    """

    def __init__(self, closed, outer: Scope | None = None, operands: Sequence = ()) -> None:
        jaxpr = open_jaxpr(closed)
        self.jaxpr = closed
        self.constants: dict = dict(zip(jaxpr.constvars, closed_consts(closed), strict=True))
        self.definitions: dict = {var: (eqn, index) for eqn in jaxpr.eqns for index, var in enumerate(eqn.outvars)}
        self.passed: dict = {
            var: (outer, atom, len(shape_of(atom)) - len(shape_of(var)))
            for var, atom in zip(jaxpr.invars, operands, strict=False)
            if atom is not None
        }
        self._regions: dict = {}

    def maker(self, atom) -> tuple[jex.JaxprEqn | None, int]:
        return (None, 0) if isinstance(atom, jex.Literal) else self.definitions.get(atom, (None, 0))

    def regions(self, eqn: jex.JaxprEqn) -> list[Scope]:
        """The jaxprs of a loop or branch."""
        if id(eqn) not in self._regions:
            self._regions[id(eqn)] = [Scope(body, self, operands) for body, operands in _regions(eqn)]
        return self._regions[id(eqn)]


def shape_of(atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _regions(eqn: jex.JaxprEqn) -> Iterator[tuple[Any, list]]:
    """Each jaxpr of a loop or branch, and what is given to its inputs: None if carried, as are those after the last."""
    match eqn.primitive.name:
        case "scan":
            consts, carry, stacks = Scan(eqn).operands
            yield Scan(eqn).closed, [*consts, *[None] * len(carry), *stacks]
        case "while":
            tested, read, _ = While(eqn).operands
            yield While(eqn).closed_condition, tested
            yield While(eqn).closed_body, read
        case "cond":
            yield from ((branch, Cond(eqn).operands) for branch in Cond(eqn).closed_branches)
