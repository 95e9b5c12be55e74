"""Matrix functions of an optimizer are dealt out: each device computes some of the matrices, and those whole.

Newton-Schulz iterations (Muon) make of every matrix of moments another, and read all of it again and again: divided by
its elements, it is gathered for every product. A stack of as many matrices as devices divide is divided by matrices
instead, which come together once. So the same function of several leaves becomes one function of a stack of them all,
filled up to a number that devices divide. (Distributed Muon deals them out likewise; https://arxiv.org/abs/2502.16982.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, line_of, open_jaxpr
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import abstract, inlined
from jax_deepcompile.ir.traversal import inline_calls, variables
from jax_deepcompile.partition.matrix_functions import MatrixFunction, is_product, matrix_functions


def dealt_out(program: Program, parts: int) -> Program:
    """``program``, global, with equal functions of its optimizer's matrices computed on stacks that ``parts`` divides.

    Before, for two leaves and two devices::

        a = dot_general x x; c = dot_general a x
        b = dot_general y y; d = dot_general b y

    After::

        s = concatenate x[None] y[None]; t = dot_general s s; u = dot_general t s; c = u[0]; d = u[1]

    No stack is more than half filled up: of few matrices most devices would compute what nobody needs.
    """
    jaxpr = open_jaxpr(program.jaxpr)
    groups: dict[tuple, list[MatrixFunction]] = {}
    for function in matrix_functions(jaxpr, program.inputs):
        groups.setdefault(function.kind, []).append(function)
    pieces = [piece for group in groups.values() for piece in _pieces(group, parts)]
    stacks = [_Stack(piece, parts) for piece in pieces if _are_worth_it(piece, parts)]
    if not stacks:
        return program
    for stack in stacks:
        jaxpr = stack.put_into(jaxpr) or jaxpr
    return program.replace(jaxpr=jex.ClosedJaxpr(jaxpr, closed_consts(program.jaxpr)))


def _pieces(group: Sequence[MatrixFunction], parts: int) -> list[tuple[MatrixFunction, ...]]:
    """``group`` in stacks no larger than they must be: each waits for all its matrices, and is in memory at once."""
    pieces: list[tuple[MatrixFunction, ...]] = [()]
    for function in group:
        pieces[-1] += (function,)
        matrices = _count(pieces[-1])
        if matrices >= parts and matrices * function.matrix_bytes >= parts * _LEAST_BYTES:
            pieces.append(())
    *pieces, last = pieces
    if pieces and 2 * _count(last) < parts:
        return [*pieces[:-1], pieces[-1] + last]
    return [*pieces, last]


_LEAST_BYTES = 1 << 26
"""Of matrices that a device has of a stack: it moves so many in a millisecond or two, and waits for few collectives."""


def _count(functions: Sequence[MatrixFunction]) -> int:
    return sum(function.matrices for function in functions)


def _are_worth_it(group: Sequence[MatrixFunction], parts: int) -> bool:
    """Whether a stack of ``group`` is divided better than what is there; one that divides already is left alone."""
    matrices = _count(group)
    return matrices > 1 and 2 * matrices >= parts and bool(group[0].matrices % parts)


@dataclass(frozen=True)
class _Stack:
    """Functions of one kind, which are computed as one."""

    functions: tuple[MatrixFunction, ...]
    parts: int

    def put_into(self, jaxpr: jex.Jaxpr) -> jex.Jaxpr | None:
        """``jaxpr`` that computes it as soon as all matrices are there; None if some are made of what it returns."""
        inside = {id(eqn) for function in self.functions for eqn in function.eqns}
        entries = [var for function in self.functions for var in function.entries]
        inputs = [*entries, *self.functions[0].shared]
        exits = [var for function in self.functions for var in function.exits]
        line = next(eqn for eqn in self.functions[0].eqns if is_product(eqn))
        with line_of(line):
            made = inline_calls(jax.make_jaxpr(self._computed)(*map(abstract, inputs)))
        missing, waiting, eqns = set(exits), list[Any](), list[Any]()
        needed = set(inputs) - {*jaxpr.invars, *jaxpr.constvars}
        for eqn in jaxpr.eqns:
            if id(eqn) in inside:
                continue
            if not missing.isdisjoint(variables(eqn.invars)):
                waiting.append(eqn)
                missing.update(eqn.outvars)
                continue
            eqns.append(eqn)
            needed.difference_update(eqn.outvars)
            if not needed and missing:
                eqns += inlined(made, inputs, exits)
                eqns += waiting
                missing, waiting = set(), []
        return None if missing else jaxpr.replace(eqns=eqns)

    def _computed(self, *inputs: jax.Array) -> list[jax.Array]:
        """The exits of all functions, of their entries and what they share."""
        first = self.functions[0]
        count, height = len(first.entries), first.matrices
        split = count * len(self.functions)
        each = [inputs[start : start + count] for start in range(0, split, count)]
        stacked = [_filled_up(_joined(alike, bool(first.rows)), self.parts) for alike in zip(*each, strict=True)]
        results = (first.of_other_rows if first.rows else first.of_each)(stacked, inputs[split:])
        return [
            lax.slice_in_dim(result, start * height, (start + 1) * height) if first.rows else result[start]
            for start in range(len(self.functions))
            for result in results
        ]


def _joined(alike: Sequence[jax.Array], are_stacks: bool) -> jax.Array:
    return lax.concatenate([value if are_stacks else lax.expand_dims(value, (0,)) for value in alike], 0)


def _filled_up(stack: jax.Array, parts: int) -> jax.Array:
    """With its first matrices once more, of which nothing comes that might not be a number."""
    more = -stack.shape[0] % parts
    return lax.concatenate([stack, stack[:more]], 0) if more else stack
