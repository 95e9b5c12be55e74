"""Whether integers provably count: whether the elements of a value with index ``i`` along a dimension are ``i``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.frontend.canonicalize.scope import Scope, shape_of
from jax_deepcompile.ir.primitives import Scan


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
    """Whether the definitions of ``atom`` lead back to an iota or a constant for which ``claim`` is true."""
    while claim is not None and not isinstance(atom, jex.Literal) and _countable(atom, claim.dim):
        eqn, index = scope.maker(atom)
        if atom in scope.constants:
            return _counts(scope.constants[atom], claim)
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


def _countable(atom, dim: int) -> bool:
    """Whether a value's type can hold the indices along ``dim``: a narrower iota starts again."""
    dtype = atom.aval.dtype
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max >= shape_of(atom)[dim] - 1


def _counts(value, claim: Claim) -> bool:
    array = _concrete(value)
    if array is None:
        return False
    if claim.column is not None:
        array = np.take(array, [claim.at], claim.column)
    return bool(np.all(np.moveaxis(array, claim.dim, -1) == np.arange(array.shape[claim.dim])))


def _concrete(value) -> np.ndarray | None:
    """A constant's value, if this process has it now."""
    known = value is not None and not isinstance(value, core.Tracer) and getattr(value, "is_fully_addressable", True)
    return np.asarray(value) if known else None


def _step_back(eqn: jex.JaxprEqn, result: int, claim: Claim, scope: Scope) -> tuple[int, Claim | None]:
    """Which operand of ``eqn`` must satisfy which claim for a result to satisfy ``claim``; None if that is unknown."""
    match eqn.primitive.name:
        case "convert_element_type" | "copy" | "copy_p" | "optimization_barrier":
            return result, claim
        case "select_n" if _is_false(eqn.invars[0], eqn.invars[1], scope):
            return 1, claim
        case "concatenate" if (column := eqn.params["dimension"]) == claim.column:
            operand, at = [(n, at) for n, atom in enumerate(eqn.invars) for at in range(shape_of(atom)[column])][
                claim.at
            ]
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
    value = None if isinstance(condition, jex.Literal) else _concrete(scope.constants.get(condition))
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
