"""Sums of small products that a loop adds up, as one product after the loop.

Before, in a backward loop over time steps that carries the gradient ``s`` of a recurrent cell's matrix::

    s = scan(t): s = s + dot(h[t], d)

After::

    D = scan(t): D[t] = d
    s = s + dot(h, D)

A time step's product is small, and the sum, as large as the matrix, is read and written in each. A factor that is a
slice of a stack is there already; others are stacked.

Guarantees: the same terms are added up, in another order; what a product in a narrow type was rounded to in every
iteration it is rounded to once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import bind, closed_consts, dce, eval_local, new_jaxpr, provenance
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.equal_work import Numbers
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import ADDITIONS, Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import rescan
from jax_deepcompile.transforms.decision import Decision, loop_named, refused, replace_loops


@dataclass(frozen=True)
class ProductsAfterLoop(Decision, kind="products_after_loop", about=("loop",)):
    """Products that a loop adds up are one product after it."""

    loop: str

    def check(self, program: Program) -> None:
        if not summed_products(loop_named(program, self.loop, "takes products out of").eqn):
            raise refused(f"{self.loop!r} adds up no products that nothing else reads")

    def describe(self) -> str:
        return f"{self.loop}: products that it adds up are one product after it"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[ProductsAfterLoop]) -> Program:
        return replace_loops(program, mesh, {each.loop: lambda loop: _run for each in decisions})


@dataclass(frozen=True)
class Summed:
    """What a loop adds to one value of its carry.

    Attributes:
      carried: its position there.
      value: what is added.
      way: the equations that make it: a product, or the sum over rows of a factor of one, and what is linear in that.
    """

    carried: int
    value: Any
    way: tuple

    @property
    def term(self) -> Any:
        return self.way[0]


def summed_products(eqn: Any) -> list[Summed]:
    """Those of a ``scan`` of which nothing but the sum is read."""
    scan = Scan(eqn)
    uses = Counter(atom for each in scan.body.eqns for atom in variables(each.invars))
    uses.update(variables(scan.body.outvars))
    makers = {var: each for each in scan.body.eqns for var in each.outvars}
    of_all_iterations = {*scan.body.constvars, *scan.inputs.consts}

    def way_to(atom: Any) -> tuple:
        """The equations from a term to ``atom``; empty where there is none."""
        made = makers.get(atom) if isinstance(atom, jex.Var) and uses[atom] == 1 else None
        if made is None or made.primitive.name not in ("dot_general", *_LINEAR):
            return ()
        before = way_to(made.invars[0]) if made.primitive.name in _LINEAR else ()
        factors = variables(made.invars)
        is_term = made.primitive.name in _TERMS and len(factors) == len(made.invars)
        return (*before, made) if before or (is_term and of_all_iterations.isdisjoint(factors)) else ()

    found = []
    for place, (before, after) in enumerate(zip(scan.inputs.carry, scan.outputs.carry, strict=True)):
        addition = makers.get(after) if isinstance(after, jex.Var) and uses[before] == uses[after] == 1 else None
        if addition is not None and addition.primitive.name in ADDITIONS and before in addition.invars:
            (value,) = (atom for atom in addition.invars if atom is not before)
            if way := way_to(value):
                found.append(Summed(place, value, way))
    factors = set(_factors(each for each in found if each.term.primitive.name == "dot_general"))
    return [each for each in found if factors.issuperset(each.term.invars)]


_LINEAR = frozenset({"transpose", "convert_element_type", "reshape", "reduce_sum", "split"})
_TERMS = frozenset({"dot_general", "reduce_sum"})


def _factors(products: Iterable[Summed]) -> list:
    return list(dict.fromkeys(atom for each in products for atom in each.term.invars))


def _stacked(eqn: Any, products: Iterable[Summed]) -> dict[Any, Any]:
    """The factors that a ``scan`` does not have as slices, each with the first of those that are made alike."""
    scan, first = Scan(eqn), dict[int, Any]()
    numbers, slices = Numbers().of_place(scan.body), set(scan.inputs.xs)
    return {atom: first.setdefault(numbers[atom], atom) for atom in _factors(products) if atom not in slices}


def written_bytes(eqn: Any) -> tuple[int, int]:
    """What an iteration of a ``scan`` writes of sums of products, and what it would stack instead."""
    products = summed_products(eqn)
    sums = (Scan(eqn).inputs.carry[each.carried] for each in products)
    return sum(map(size_bytes, sums)), sum(map(size_bytes, set(_stacked(eqn, products).values())))


def _run(eqn: Any, operands: list) -> list:
    scan, products = Scan(eqn), summed_products(eqn)
    consts, carry, stacks = scan.split(operands)
    stacked = _stacked(eqn, products)
    made = list(dict.fromkeys(stacked.values()))
    summed = {each.carried for each in products}
    kept = [place for place in range(scan.num_carry) if place not in summed]
    body, closed = scan.body, [*closed_consts(scan.closed), *consts]
    results = [*(scan.outputs.carry[place] for place in kept), *scan.outputs.ys, *made]
    inner = dce(new_jaxpr([*body.constvars, *body.invars], results, body.eqns))

    def step(left: list, slices: list) -> list:
        given = dict(zip(kept, left, strict=True))
        return eval_local(inner, [*closed, *(given.get(place, value) for place, value in enumerate(carry)), *slices])

    done = rescan(eqn, step, [carry[place] for place in kept], stacks)
    left, ys, more = done[: len(kept)], done[len(kept) : len(done) - len(made)], done[len(done) - len(made) :]
    own = dict(zip(made, more, strict=True))
    factors = dict(zip(scan.inputs.xs, stacks, strict=True)) | {atom: own[same] for atom, same in stacked.items()}
    final = dict(zip(kept, left, strict=True)) | _totals(products, factors, carry)
    return [*(final[place] for place in range(scan.num_carry)), *ys]


def _totals(products: Sequence[Summed], stacks: Mapping[Any, Any], carry: Sequence) -> dict[int, Any]:
    """What each value of the carry is after the loop, of the stacks of all factors."""
    known: dict[Any, Any] = {}
    for each in products:
        for eqn in each.way:
            if eqn.outvars[0] not in known:
                of_all = [_total(eqn, stacks)] if eqn is each.term else None
                known.update(zip(eqn.outvars, of_all or bind(eqn, [known[eqn.invars[0]]]), strict=True))
    return {each.carried: carry[each.carried] + known[each.value] for each in products}


def _total(term: Any, stacks: Mapping[Any, Any]) -> Any:
    """The sum of ``term`` over all iterations."""
    (first, *second), params = [stacks[atom] for atom in term.invars], term.params
    with provenance(term):
        if not second:
            return jnp.sum(first, (0, *(dim + 1 for dim in params["axes"])), dtype=first.dtype)
        (contracted, batch) = ([tuple(dim + 1 for dim in dims) for dims in one] for one in params["dimension_numbers"])
        numbers = (((0, *contracted[0]), (0, *contracted[1])), (batch[0], batch[1]))
        return lax.dot_general(first, second[0], numbers, params["precision"], params["preferred_element_type"])
