"""Whether integers provably count: whether the elements of a value with index ``i`` along a dimension are ``i``.

Their definitions are followed through equations, into loops and branches, and out of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.ir.known_values import makers_inside, values_of
from jax_deepcompile.ir.primitives import Cond, Scan, While

_MOST_BYTES = 1 << 26
"""Of indices that are looked at."""


class Scope:
    """Where the variables of one jaxpr come from.

    Attributes:
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
        self.makers: dict = {} if outer is None else self._makers_outside(outer)
        self.makers |= {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._known = {var: value for var, value in self.constants.items() if _is_known(value)}
        self._values: dict = {}
        self._regions: dict = {}

    def value(self, var) -> np.ndarray | None:
        """Of a variable, if nothing but constants makes it."""
        if var not in self._values:
            found = values_of([var], self.makers, _MOST_BYTES, self._known)
            self._values[var] = None if found is None else found[0]
        return self._values[var]

    def _makers_outside(self, outer: Scope) -> dict:
        whole = [(var, atom) for var, (_, atom, dims) in self.passed.items() if not dims]
        return makers_inside(whole, outer.makers)

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


class Claim(NamedTuple):
    """That elements with index ``i`` along ``dim`` are ``i``; of dimension ``column`` only position ``at`` matters."""

    dim: int
    column: int | None = None
    at: int = 0

    def shifted(self, dims: int) -> Claim | None:
        """The claim about a value with ``dims`` more leading dimensions; None if it was about one that is gone."""
        if self.dim + dims < 0 or (self.column is not None and self.column + dims < 0):
            return None
        return Claim(self.dim + dims, None if self.column is None else self.column + dims, self.at)


def holds(claim: Claim | None, atom, scope: Scope) -> bool:
    """Whether the definitions of ``atom`` lead back to an iota or a constant for which ``claim`` is true.

    What is made of nothing, such as ``jnp.arange(B * K) // K`` as ``[B, K]``, is looked at itself.
    """
    while claim is not None and not isinstance(atom, jex.Literal) and _countable(atom, claim.dim):
        if (known := scope.value(atom)) is not None:
            return _counts(known, claim)
        eqn, index = scope.maker(atom)
        if atom in scope.passed:
            scope, atom, dims = scope.passed[atom]
            claim = claim.shifted(dims)
        elif eqn is None:
            return False
        elif eqn.primitive.name == "iota":
            return eqn.params["dimension"] == claim.dim
        elif eqn.primitive.name == "scan":
            (scope,) = scope.regions(eqn)
            atom = open_jaxpr(scope.jaxpr).outvars[index]
            claim = claim.shifted(-1) if index >= Scan(eqn).num_carry else None
        else:
            operand, claim = _step_back(eqn, index, claim, scope)
            atom = eqn.invars[operand]
    return False


def known_values(indices, component: int, scope: Scope) -> np.ndarray | None:
    """One component of ``indices``, whose last dimension has them, if it is made of nothing."""
    last = len(shape_of(indices)) - 1
    eqn, _ = scope.maker(indices)
    if eqn is not None and eqn.primitive.name == "concatenate" and eqn.params["dimension"] == last:
        places = [(atom, at) for atom in eqn.invars for at in range(shape_of(atom)[last])]
        indices, component = places[component]
    known = None if isinstance(indices, jex.Literal) else scope.value(indices)
    return None if known is None else np.take(known, component, last)


def _countable(atom, dim: int) -> bool:
    """Whether a value's type can hold the indices along ``dim``: a narrower iota starts again."""
    dtype = atom.aval.dtype
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max >= shape_of(atom)[dim] - 1


def _counts(array: np.ndarray, claim: Claim) -> bool:
    if claim.column is not None:
        array = np.take(array, [claim.at], claim.column)
    return bool(np.all(np.moveaxis(array, claim.dim, -1) == np.arange(array.shape[claim.dim])))


def _is_known(value) -> bool:
    """Whether this process has the value of a constant now."""
    return value is not None and not isinstance(value, core.Tracer) and getattr(value, "is_fully_addressable", True)


def _step_back(eqn: jex.JaxprEqn, result: int, claim: Claim, scope: Scope) -> tuple[int, Claim | None]:
    """Which operand of ``eqn`` must satisfy which claim for a result to satisfy ``claim``; None if that is unknown."""
    match eqn.primitive.name:
        case "convert_element_type" | "copy" | "copy_p" | "optimization_barrier":
            return result, claim
        case "select_n" if _is_false(eqn.invars[0], eqn.invars[1], scope):
            return 1, claim
        case "concatenate" if (column := eqn.params["dimension"]) == claim.column:
            places = [(n, at) for n, atom in enumerate(eqn.invars) for at in range(shape_of(atom)[column])]
            operand, at = places[claim.at]
            return operand, claim._replace(at=at)
        case "broadcast_in_dim":
            return 0, _moved(eqn, claim, {dim: source for source, dim in enumerate(eqn.params["broadcast_dimensions"])})
        case "transpose":
            return 0, _moved(eqn, claim, dict(enumerate(eqn.params["permutation"])))
        case "squeeze" | "reshape" if eqn.primitive.name == "squeeze" or eqn.params["dimensions"] is None:
            return 0, _moved(eqn, claim, _unit_dims_apart(shape_of(eqn.outvars[0]), shape_of(eqn.invars[0])))
    return 0, None


def _is_false(condition, number, scope: Scope) -> bool:
    """Whether ``condition`` is that ``number``, which counts from 0, is negative, or is a constant that never holds."""
    eqn, _ = scope.maker(condition)
    if eqn is not None and eqn.primitive.name == "lt":
        left, right = eqn.invars
        return left is number and isinstance(right, jex.Literal) and bool(np.all(right.val == 0))
    value = None if isinstance(condition, jex.Literal) else scope.value(condition)
    return value is not None and not value.any()


def _moved(eqn: jex.JaxprEqn, claim: Claim, source: dict[int, int]) -> Claim | None:
    """The claim about the operand, of which dimension ``source[dim]`` became ``dim``."""
    operand, result = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    dim = source.get(claim.dim)
    if dim is None or operand[dim] != result[claim.dim]:
        return None
    column = None if claim.column is None else source.get(claim.column)
    return Claim(dim, column, claim.at if column is not None and operand[column] > 1 else 0)


def _unit_dims_apart(result: Sequence[int], operand: Sequence[int]) -> dict[int, int]:
    """Which dimension came from which, if the two shapes differ in dimensions of size 1 alone."""
    here, there = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (result, operand))
    same = [result[dim] for dim in here] == [operand[dim] for dim in there]
    return dict(zip(here, there, strict=True)) if same else {}
