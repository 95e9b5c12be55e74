"""Which inputs a program's results carry on: the same elements, changed one by one, moved or in part replaced.

A new value of a parameter carries on the old one; a gradient of it does not, it has gone through products and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr, scan_counts

_MIXING = frozenset(
    {"argmax", "argmin", "conv_general_dilated", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "custom_call"}
    | {"dot_general", "eigh", "fft", "gather", "lu", "qr", "ragged_dot", "ragged_dot_general", "random_bits"}
    | {"random_split", "scaled_matmul", "sort", "svd", "threefry2x32", "top_k", "triangular_solve"}
)
"""Primitives whose results are made of many elements at once; so are those of all reductions."""


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
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carry = scan_counts(eqn)
        return _loop(params["jaxpr"], operands[:consts], operands[consts : consts + carry], operands[consts + carry :])
    if name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        return _loop(params["body_jaxpr"], operands[params["cond_nconsts"] : first], operands[first:], [])
    if name == "cond":
        branches = [_outputs(open_jaxpr(branch), operands[1:]) for branch in params["branches"]]
        return [reduce(or_, results) for results in zip(*branches, strict=True)]
    if name == "optimization_barrier":
        return operands
    mixes = name in _MIXING or (name.startswith("reduce_") and name != "reduce_precision")
    return [0 if mixes else reduce(or_, operands, 0)] * len(eqn.outvars)


def _loop(body: Any, consts: list[int], carry: list[int], stacked: list[int]) -> list[int]:
    """A carry is what it was before the loop, and what any number of iterations made of it."""
    while True:
        outputs = _outputs(open_jaxpr(body), [*consts, *carry, *stacked])
        after = [before | new for before, new in zip(carry, outputs[: len(carry)], strict=True)]
        if after == carry:
            return [*after, *outputs[len(carry) :]]
        carry = after
