"""Which inputs a program's results carry on: the same elements, changed one by one, moved or in part replaced.

A new value of a parameter carries on the old one; a gradient of it does not, it has gone through products and sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.primitives import MIXING, Cond, Scan, While
from jax_deepcompile.ir.traversal import nested_jaxprs


@dataclass(frozen=True)
class Lineage:
    """Where the results of a program come from. Sets of inputs are the bits of a number.

    Attributes:
      carried: for each result the inputs that it carries on.
      mixed: inputs that go, or what carries them on goes, into products, reductions and other equations that make a
        result of many elements; all others are touched by elementwise arithmetic alone.
      same: for each result the input that it is; None if it is computed.
    """

    carried: tuple[int, ...]
    mixed: int
    same: tuple[int | None, ...]

    def is_input(self, result: int) -> bool:
        return self.same[result] is not None


def lineage(jaxpr: Any) -> Lineage:
    """Of the results of ``jaxpr``."""
    inner, walk = open_jaxpr(jaxpr), _Walk()
    carried = walk.outputs(inner, [1 << position for position in range(len(inner.invars))])
    places = {var: place for place, var in enumerate(inner.invars)}
    same = tuple(None if isinstance(atom, jex.Literal) else places.get(atom) for atom in inner.outvars)
    return Lineage(tuple(carried), walk.mixed, same)


def dependence(jaxpr: Any) -> tuple[tuple[int, int], ...]:
    """For each result of ``jaxpr`` the inputs that it depends on, and those of them through what mixes elements."""
    inner = open_jaxpr(jaxpr)
    count = len(inner.invars)
    found = _Dependence(count=count).outputs(inner, [1 << position for position in range(count)])
    return tuple((bits & (1 << count) - 1, bits >> count) for bits in found)


def members(bits: int) -> Iterator[int]:
    """Of a set that is the bits of a number, the highest first."""
    while bits:
        yield bits.bit_length() - 1
        bits ^= 1 << bits.bit_length() - 1


@dataclass
class _Walk:
    """Goes through equations, and keeps what was mixed."""

    mixed: int = 0

    def outputs(self, jaxpr: jex.Jaxpr, inputs: Sequence[int]) -> list[int]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            return 0 if isinstance(atom, jex.Literal) else known.get(atom, 0)

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._results(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: jex.JaxprEqn, operands: list[int]) -> list[int]:
        match eqn.primitive.name:
            case "scan":
                return self._loop(Scan(eqn).body, *Scan(eqn).split(operands))
            case "while":
                tested, consts, carry = While(eqn).split(operands)
                results = self._loop(While(eqn).body, consts, carry, [])
                self.outputs(While(eqn).condition, [*tested, *results])
                return results
            case "cond":
                branches = [self.outputs(branch, operands[1:]) for branch in Cond(eqn).branches]
                return [reduce(or_, results) for results in zip(*branches, strict=True)]
            case "optimization_barrier":
                return operands
        return [self._made(eqn, reduce(or_, operands, 0))] * len(eqn.outvars)

    def _made(self, eqn: jex.JaxprEqn, together: int) -> int:
        """What an equation makes of operands that are ``together`` of these inputs."""
        mixes = eqn.primitive.name in MIXING
        if mixes or nested_jaxprs(eqn):
            self.mixed |= together
        return 0 if mixes else together

    def _loop(self, body: jex.Jaxpr, consts: list[int], carry: list[int], stacked: list[int]) -> list[int]:
        """A carry is what it was before the loop, and what any number of iterations made of it."""
        while True:
            outputs = self.outputs(body, [*consts, *carry, *stacked])
            after = [before | new for before, new in zip(carry, outputs[: len(carry)], strict=True)]
            if after == carry:
                return [*after, *outputs[len(carry) :]]
            carry = after


@dataclass
class _Dependence(_Walk):
    """Of sets of inputs behind those that are mixed, each of ``count``."""

    count: int = 0

    def _made(self, eqn: jex.JaxprEqn, together: int) -> int:
        mixes = eqn.primitive.name in MIXING or nested_jaxprs(eqn)
        return together | (together & (1 << self.count) - 1) << self.count if mixes else together
