"""Equations are written as partitioning rules expect them.

Gathers and scatters that spell a batch dimension out as an index get a batching dimension instead, ``while`` loops that
were batched one condition, and inner products the shapes that their operands have.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend import core as jex
from jax.extend.core import primitives

from jax_deepcompile._jax_compat import closed_consts, new_var, open_jaxpr
from jax_deepcompile.frontend.canonicalize.batched_while import with_one_condition
from jax_deepcompile.frontend.canonicalize.inner_products import without_ravel


def canonicalize(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with implicit batch dimensions of gathers and scatters made explicit, inside loops and branches too.

    ``logits[jnp.arange(B), labels]`` reads from row ``b`` at position ``labels[b]``, and its gradient adds there. To
    JAX the row is a number like any other, so that a device seems to need every row. Where a component of the index
    provably counts along a dimension of the index batch, and that is as long as the operand's dimension, the two become
    a pair of batching dimensions and the component is dropped. Results keep every bit: what remains of an index is out
    of bounds where it was, and as unique. Calls should be inlined. Without such an index ``closed`` itself comes back.

    Before::

        c:i32[8,1] = iota[dimension=0 dtype=int32 shape=(8, 1) sharding=None]
        d:i32[8,2] = concatenate[dimension=1] c b
        e:f32[8] = gather[dimension_numbers=GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1),
          start_index_map=(0, 1), operand_batching_dims=(), start_indices_batching_dims=()) ...] a d

    After, with ``c`` and ``d`` dead::

        e:f32[8] = gather[dimension_numbers=GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(1,),
          start_index_map=(1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,)) ...] a b
    """
    return _Canonicalizer(_Scope(closed)).run()


class _Scope:
    """Where the variables of one jaxpr come from.

    Attributes:
      jaxpr: the jaxpr, closed.
      constants: values of its constants.
      definitions: for each computed variable its equation, and which of the results it is.
      passed: for inputs of a loop's body or a branch the scope outside, what it passes, and how many leading dimensions
        the loop takes off. What a loop carries is not known.
    """

    def __init__(self, closed, outer: _Scope | None = None, operands: Sequence = ()) -> None:
        jaxpr = open_jaxpr(closed)
        self.jaxpr = closed
        self.constants: dict = dict(zip(jaxpr.constvars, closed_consts(closed), strict=True))
        self.definitions: dict = {var: (eqn, index) for eqn in jaxpr.eqns for index, var in enumerate(eqn.outvars)}
        self.passed: dict = {
            var: (outer, atom, len(_shape(atom)) - len(_shape(var)))
            for var, atom in zip(jaxpr.invars, operands, strict=False)
            if atom is not None
        }
        self._regions: dict = {}

    def maker(self, atom) -> tuple[jex.JaxprEqn | None, int]:
        return (None, 0) if isinstance(atom, jex.Literal) else self.definitions.get(atom, (None, 0))

    def regions(self, eqn: jex.JaxprEqn) -> dict[str, list[_Scope]]:
        """The jaxprs of a loop or branch, by the name of their parameter."""
        if id(eqn) not in self._regions:
            self._regions[id(eqn)] = {
                name: [_Scope(body, self, operands) for body in bodies] for name, bodies, operands in _regions(eqn)
            }
        return self._regions[id(eqn)]


def _shape(atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _regions(eqn: jex.JaxprEqn) -> Iterator[tuple[str, Sequence, list]]:
    """For each parameter with jaxprs: its name, the jaxprs, and what is given to their inputs; None if carried."""
    atoms, params = list(eqn.invars), eqn.params
    match eqn.primitive.name:
        case "scan":
            consts, carried = _whole_operands(eqn)
            yield "jaxpr", [params["jaxpr"]], [*atoms[:consts], *[None] * carried, *atoms[consts + carried :]]
        case "while":
            conds, bodies = params["cond_nconsts"], params["body_nconsts"]
            carry = [None] * (len(atoms) - conds - bodies)
            yield "cond_jaxpr", [params["cond_jaxpr"]], [*atoms[:conds], *carry]
            yield "body_jaxpr", [params["body_jaxpr"]], [*atoms[conds : conds + bodies], *carry]
        case "cond":
            yield "branches", params["branches"], atoms[1:]


def _whole_operands(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """How many constants a scan has and how much it carries, from ranks: versions differ in which parameter says so."""
    body = open_jaxpr(eqn.params["jaxpr"])
    whole, carried = (
        sum(len(_shape(a)) == len(_shape(b)) for a, b in zip(outside, inside, strict=True))
        for outside, inside in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    )
    return whole - carried, carried


class _Claim(NamedTuple):
    """That elements with index ``i`` along ``dim`` are ``i``; of dimension ``column`` only position ``at`` matters."""

    dim: int
    column: int | None = None
    at: int = 0

    def shifted(self, dims: int) -> _Claim | None:
        """The claim about a value with ``dims`` more leading dimensions; None if it was about one that is gone."""
        if self.dim + dims < 0 or (self.column is not None and self.column + dims < 0):
            return None
        return _Claim(self.dim + dims, None if self.column is None else self.column + dims, self.at)


def _holds(claim: _Claim | None, atom, scope: _Scope) -> bool:
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
            (scope,) = scope.regions(eqn)["jaxpr"]
            atom = open_jaxpr(scope.jaxpr).outvars[index]
            claim = claim.shifted(-1) if index >= _whole_operands(eqn)[1] else None
        else:
            operand, claim = _step_back(eqn, index, claim, scope)
            atom = eqn.invars[operand]
    return False


def _countable(atom, dim: int) -> bool:
    """Whether a value's type can hold the indices along ``dim``: a narrower iota starts again."""
    dtype = atom.aval.dtype
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max >= _shape(atom)[dim] - 1


def _counts(value, claim: _Claim) -> bool:
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


def _step_back(eqn: jex.JaxprEqn, result: int, claim: _Claim, scope: _Scope) -> tuple[int, _Claim | None]:
    """Which operand of ``eqn`` must satisfy which claim for a result to satisfy ``claim``; None if that is unknown."""
    match eqn.primitive.name:
        case "convert_element_type" | "copy" | "copy_p" | "optimization_barrier":
            return result, claim
        case "select_n" if _is_false(eqn.invars[0], eqn.invars[1], scope):
            return 1, claim
        case "concatenate" if (column := eqn.params["dimension"]) == claim.column:
            operand, at = [(n, at) for n, atom in enumerate(eqn.invars) for at in range(_shape(atom)[column])][claim.at]
            return operand, claim._replace(at=at)
        case "broadcast_in_dim":
            return 0, _moved(eqn, claim, {dim: source for source, dim in enumerate(eqn.params["broadcast_dimensions"])})
        case "transpose":
            return 0, _moved(eqn, claim, dict(enumerate(eqn.params["permutation"])))
        case "squeeze" | "reshape" if eqn.primitive.name == "squeeze" or eqn.params["dimensions"] is None:
            return 0, _moved(eqn, claim, _unit_dims_apart(_shape(eqn.outvars[0]), _shape(eqn.invars[0])))
    return 0, None


def _is_false(condition, number, scope: _Scope) -> bool:
    """Whether ``condition`` is that ``number``, which counts from 0, is negative, or is a constant that never holds."""
    eqn, _ = scope.maker(condition)
    if eqn is not None and eqn.primitive.name == "lt":
        left, right = eqn.invars
        return left is number and isinstance(right, jex.Literal) and bool(np.all(right.val == 0))
    value = None if isinstance(condition, jex.Literal) else _concrete(scope.constants.get(condition))
    return value is not None and not value.any()


def _moved(eqn: jex.JaxprEqn, claim: _Claim, source: dict[int, int]) -> _Claim | None:
    """The claim about the operand, of which dimension ``source[dim]`` became ``dim``."""
    operand, result = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    dim = source.get(claim.dim)
    if dim is None or operand[dim] != result[claim.dim]:
        return None
    column = None if claim.column is None else source.get(claim.column)
    return _Claim(dim, column, claim.at if column is not None and operand[column] > 1 else 0)


def _unit_dims_apart(result: Sequence[int], operand: Sequence[int]) -> dict[int, int]:
    """Which dimension came from which, if the two shapes differ in dimensions of size 1 alone."""
    here, there = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (result, operand))
    same = [result[dim] for dim in here] == [operand[dim] for dim in there]
    return dict(zip(here, there, strict=True)) if same else {}


_INDEXED = frozenset({"gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
"""Their dimension numbers are five tuples that mean the same: those of the window, those dropped from the window, those
indexed by each component, and the batching dimensions of operand and indices."""


def _choose_batching(eqn: jex.JaxprEqn, scope: _Scope) -> dict[int, tuple[int, int]]:
    """For each component that counts: the operand's dimension it indexes, the dimension of the index batch it is."""
    operand, indices = _shape(eqn.invars[0]), _shape(eqn.invars[1])
    _, dropped, index_map, _, batching = eqn.params["dimension_numbers"]
    free = [dim for dim in range(len(indices) - 1) if dim not in batching]
    chosen: dict[int, tuple[int, int]] = {}
    for component, dim in enumerate(index_map):
        for other in [other for other in free if dim in dropped and indices[other] == operand[dim] > 1]:
            if _holds(_Claim(other, len(indices) - 1, component), eqn.invars[1], scope):
                chosen[component] = (dim, other)
                free.remove(other)
                break
    return chosen


def _with_batching(numbers, added: Sequence[tuple[int, int]]):
    """Dimension numbers of a gather or scatter with more batching dimensions, in the operand's order as it must be."""
    window, dropped, index_map, operand_dims, index_dims = numbers
    pairs = sorted([*zip(operand_dims, index_dims, strict=True), *added])
    batching = [dim for dim, _ in pairs]
    dropped, index_map = ([dim for dim in dims if dim not in batching] for dims in (dropped, index_map))
    fields = (window, dropped, index_map, batching, [other for _, other in pairs])
    return type(numbers)(*(tuple(int(dim) for dim in dims) for dims in fields))


class _Canonicalizer:
    """Rewrites the jaxpr of one scope."""

    def __init__(self, scope: _Scope) -> None:
        self.scope = scope
        self.eqns: list[jex.JaxprEqn] = []

    def run(self) -> jex.ClosedJaxpr:
        closed, changed = self.scope.jaxpr, False
        for eqn in open_jaxpr(closed).eqns:
            rewritten = self._rewritten(eqn)
            changed |= rewritten is not eqn
            self.eqns.append(rewritten)
        return jex.ClosedJaxpr(open_jaxpr(closed).replace(eqns=self.eqns), closed_consts(closed)) if changed else closed

    def _rewritten(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        if eqn.primitive.name in _INDEXED:
            return self._batched(eqn)
        return self._with_regions(with_one_condition(without_ravel(eqn, self.scope.maker)))

    def _with_regions(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        changed = {}
        for name, scopes in self.scope.regions(eqn).items():
            bodies = tuple(_Canonicalizer(scope).run() for scope in scopes)
            if any(body is not scope.jaxpr for body, scope in zip(bodies, scopes, strict=True)):
                changed[name] = bodies if isinstance(eqn.params[name], tuple) else bodies[0]
        return eqn.replace(params={**eqn.params, **changed}) if changed else eqn

    def _batched(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        chosen = _choose_batching(eqn, self.scope)
        if not chosen:
            return eqn
        numbers = _with_batching(eqn.params["dimension_numbers"], list(chosen.values()))
        params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        return eqn.replace(invars=[eqn.invars[0], self._indices_without(eqn, chosen), *eqn.invars[2:]], params=params)

    def _indices_without(self, eqn: jex.JaxprEqn, components: Container[int]):
        """The indices of ``eqn`` less some components: what else was concatenated, or slices of it."""
        indices = eqn.invars[1]
        last = len(_shape(indices)) - 1
        made, _ = self.scope.maker(indices)
        joined = made is not None and made.primitive.name == "concatenate" and made.params["dimension"] == last
        pieces, first = [], 0
        for atom in made.invars if made is not None and joined else [indices]:
            width = _shape(atom)[last]
            kept = [at for at in range(width) if first + at not in components]
            pieces += [atom] if len(kept) == width else [self._slice(eqn, atom, at, at + 1) for at in kept]
            first += width
        pieces = pieces or [self._slice(eqn, indices, 0, 0)]
        width = sum(_shape(atom)[last] for atom in pieces)
        joining = primitives.concatenate_p, {"dimension": last}
        return pieces[0] if len(pieces) == 1 else self._compute(eqn, *joining, pieces, width)

    def _slice(self, eqn: jex.JaxprEqn, atom, start: int, stop: int):
        *batch, _ = _shape(atom)
        limits = {"start_indices": (*[0] * len(batch), start), "limit_indices": (*batch, stop), "strides": None}
        return self._compute(eqn, primitives.slice_p, limits, [atom], stop - start)

    def _compute(self, eqn: jex.JaxprEqn, primitive: jex.Primitive, params: dict, operands: list, width: int):
        """Adds an equation on behalf of ``eqn``, whose result is that wide in the last dimension."""
        result = new_var(core.ShapedArray((*_shape(operands[0])[:-1], width), operands[0].aval.dtype))
        origin = eqn.source_info, eqn.ctx
        self.eqns.append(jex.new_jaxpr_eqn(operands, [result], primitive, params, jex.no_effects, *origin))
        return result
