"""Which inputs a program's results carry on: the same elements, changed one by one, moved or in part replaced.

A new value of a parameter carries on the old one; a gradient of it does not, it has gone through products and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.primitives import MIXING, Cond, Scan, While


def carried_inputs(jaxpr: Any) -> tuple[int, ...]:
    """For each result of ``jaxpr`` the inputs that it carries on, as the bits of a number."""
    inner = open_jaxpr(jaxpr)
    return tuple(_outputs(inner, [1 << position for position in range(len(inner.invars))]))


def _outputs(jaxpr: jex.Jaxpr, inputs: Sequence[int]) -> list[int]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, jex.Literal) else known.get(atom, 0)

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _results(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(eqn: jex.JaxprEqn, operands: list[int]) -> list[int]:
    match eqn.primitive.name:
        case "scan":
            return _loop(Scan(eqn).body, *Scan(eqn).split(operands))
        case "while":
            _, consts, carry = While(eqn).split(operands)
            return _loop(While(eqn).body, consts, carry, [])
        case "cond":
            branches = [_outputs(branch, operands[1:]) for branch in Cond(eqn).branches]
            return [reduce(or_, results) for results in zip(*branches, strict=True)]
        case "optimization_barrier":
            return operands
    return [0 if eqn.primitive.name in MIXING else reduce(or_, operands, 0)] * len(eqn.outvars)


def _loop(body: jex.Jaxpr, consts: list[int], carry: list[int], stacked: list[int]) -> list[int]:
    """A carry is what it was before the loop, and what any number of iterations made of it."""
    while True:
        outputs = _outputs(body, [*consts, *carry, *stacked])
        after = [before | new for before, new in zip(carry, outputs[: len(carry)], strict=True)]
        if after == carry:
            return [*after, *outputs[len(carry) :]]
        carry = after
