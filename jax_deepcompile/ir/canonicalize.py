"""Gathers and scatters that spell a batch dimension out as an index are written with a batching dimension instead."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend.core import primitives

from jax_deepcompile._jax_compat import closed_consts, new_var, open_jaxpr


def canonicalize(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with implicit batch dimensions of gathers and scatters made explicit, inside loops and branches too.

    ``logits[jnp.arange(B), labels]`` reads from row ``b`` at position ``labels[b]``, and its gradient adds there. To JAX
    the row is a number like any other, so that a device seems to need every row. Where a component of the index provably
    counts along a dimension of the index batch, and that is as long as the operand's dimension, the two become a pair of
    batching dimensions and the component is dropped. Results keep every bit: what remains is out of bounds where it was,
    and as unique. Expects calls to be inlined; returns ``closed`` itself where there is nothing to do.

    Before::

        { lambda ; a:f32[8,16] b:i32[8,1]. let
            c:i32[8,1] = iota[dimension=0 dtype=int32 shape=(8, 1) sharding=None]
            d:i32[8,2] = concatenate[dimension=1] c b
            e:f32[8] = gather[dimension_numbers=GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1),
              start_index_map=(0, 1), operand_batching_dims=(), start_indices_batching_dims=()) ...] a d
          in (e,) }

    After, the other two equations being dead::

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
      passed: for inputs of a loop's body or a branch the scope outside, what is passed there, and how many leading
        dimensions the loop takes off.
    """

    def __init__(self, closed, outer: _Scope | None = None, operands: Sequence = ()) -> None:
        jaxpr = open_jaxpr(closed)
        self.jaxpr = closed
        self.constants = dict(zip(jaxpr.constvars, closed_consts(closed), strict=True))
        self.definitions = {var: (eqn, index) for eqn in jaxpr.eqns for index, var in enumerate(eqn.outvars)}
        self.passed = {
            var: (outer, atom, len(atom.aval.shape) - len(var.aval.shape))
            for var, atom in zip(jaxpr.invars, operands, strict=False)
            if atom is not None
        }
        self._regions: dict = {}

    def regions(self, eqn: jex.JaxprEqn) -> dict[str, list[_Scope]]:
        """The jaxprs of a loop or branch, by the name of their parameter."""
        if id(eqn) not in self._regions:
            self._regions[id(eqn)] = {
                name: [_Scope(body, self, operands) for body in _as_tuple(eqn.params[name])]
                for name, operands in _region_operands(eqn).items()
            }
        return self._regions[id(eqn)]


def _as_tuple(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _region_operands(eqn: jex.JaxprEqn) -> dict[str, list]:
    """For each parameter that holds jaxprs what each of their inputs is given; None for what a loop carries."""
    atoms: list = list(eqn.invars)
    match eqn.primitive.name:
        case "scan":
            stacked = sum(_loop_dims(eqn.invars, open_jaxpr(eqn.params["jaxpr"]).invars))
            first, last = len(atoms) - stacked - _carried(eqn), len(atoms) - stacked
            return {"jaxpr": [*atoms[:first], *[None] * _carried(eqn), *atoms[last:]]}
        case "while":
            conds, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = [None] * (len(atoms) - conds - bodies)
            return {"cond_jaxpr": [*atoms[:conds], *carry], "body_jaxpr": [*atoms[conds : conds + bodies], *carry]}
        case "cond":
            return {"branches": atoms[1:]}
    return {}


def _loop_dims(outside: Sequence, inside: Sequence) -> list[int]:
    """For each value 1 if a scan stacks it, 0 if it passes it on as it is (no parameter says so in every version)."""
    return [len(a.aval.shape) - len(b.aval.shape) for a, b in zip(outside, inside, strict=True)]


def _carried(eqn: jex.JaxprEqn) -> int:
    return _loop_dims(eqn.outvars, open_jaxpr(eqn.params["jaxpr"]).outvars).count(0)


class _Claim(NamedTuple):
    """That all elements of a value with index ``i`` along ``dim`` are ``i``.

    Attributes:
      dim: the dimension counted along.
      column: a dimension of which only one position matters, or None.
      at: that position.
    """

    dim: int
    column: int | None = None
    at: int = 0

    def shifted(self, dims: int) -> _Claim | None:
        """The claim about a value with ``dims`` more leading dimensions; None if it was about one that is gone."""
        if self.dim + dims < 0 or (self.column is not None and self.column + dims < 0):
            return None
        return _Claim(self.dim + dims, None if self.column is None else self.column + dims, self.at)


def _holds(claim: _Claim | None, atom, scope: _Scope) -> bool:
    """Whether ``claim`` can be followed back through definitions of ``atom`` to an iota or a constant that proves it."""
    while claim is not None and not isinstance(atom, jex.Literal) and _countable(atom.aval, claim.dim):
        if atom in scope.constants:
            return _counts(scope.constants[atom], claim)
        if atom in scope.passed:
            scope, atom, dims = scope.passed[atom]
            claim = claim.shifted(dims)
            continue
        if atom not in scope.definitions:
            return False
        eqn, index = scope.definitions[atom]
        if eqn.primitive.name == "iota":
            return eqn.params["dimension"] == claim.dim
        if eqn.primitive.name == "scan":
            (scope,) = scope.regions(eqn)["jaxpr"]
            atom = open_jaxpr(scope.jaxpr).outvars[index]
            claim = claim.shifted(-1) if index >= _carried(eqn) else None
            continue
        index, claim = _step_back(eqn, index, claim, scope)
        atom = eqn.invars[index]
    return False


def _countable(aval, dim: int) -> bool:
    """Whether the type of a value can hold the indices along ``dim``: a narrower iota starts again."""
    return jax.dtypes.issubdtype(aval.dtype, np.integer) and jax.numpy.iinfo(aval.dtype).max >= aval.shape[dim] - 1


def _counts(value, claim: _Claim) -> bool:
    array = _concrete(value)
    if array is None:
        return False
    if claim.column is not None:
        array = np.take(array, [claim.at], claim.column)
    return bool(np.all(np.moveaxis(array, claim.dim, -1) == np.arange(array.shape[claim.dim])))


def _concrete(value) -> np.ndarray | None:
    """A constant's value, if this process has it now."""
    known = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    return np.asarray(value) if known else None


def _step_back(eqn: jex.JaxprEqn, result: int, claim: _Claim, scope: _Scope) -> tuple[int, _Claim | None]:
    """Which operand of ``eqn`` must satisfy which claim for a result to satisfy ``claim``; None if that is not known."""
    params = eqn.params
    match eqn.primitive.name:
        case "convert_element_type" | "copy" | "copy_p":
            return 0, claim
        case "optimization_barrier":
            return result, claim
        case "select_n":
            return 1, claim if _is_false(eqn.invars[0], eqn.invars[1], scope) else None
        case "concatenate":
            return _concatenated(eqn, claim)
        case "slice":
            return 0, _sliced(eqn, claim)
        case "broadcast_in_dim":
            return 0, _moved(eqn, claim, {dim: source for source, dim in enumerate(params["broadcast_dimensions"])})
        case "transpose":
            return 0, _moved(eqn, claim, dict(enumerate(params["permutation"])))
        case "squeeze" | "reshape":
            return 0, _moved(eqn, claim, _unit_dims_apart(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape))
    return 0, None


def _is_false(condition, number, scope: _Scope) -> bool:
    """Whether ``condition`` is that ``number``, which counts from 0, is negative, or is a constant that never holds."""
    if isinstance(condition, jex.Literal):
        return False
    if condition in scope.constants:
        value = _concrete(scope.constants[condition])
        return value is not None and not value.any()
    eqn, _ = scope.definitions.get(condition, (None, 0))
    if eqn is None or eqn.primitive.name != "lt":
        return False
    left, right = eqn.invars
    return left is number and isinstance(right, jex.Literal) and bool(np.all(right.val == 0))


def _concatenated(eqn: jex.JaxprEqn, claim: _Claim) -> tuple[int, _Claim | None]:
    if claim.column != eqn.params["dimension"]:
        return 0, None
    ends = np.cumsum([atom.aval.shape[claim.column] for atom in eqn.invars])
    index = int(np.searchsorted(ends, claim.at, side="right"))
    before = int(ends[index - 1]) if index else 0
    return index, claim._replace(at=claim.at - before)


def _sliced(eqn: jex.JaxprEqn, claim: _Claim) -> _Claim | None:
    starts, strides = eqn.params["start_indices"], eqn.params["strides"] or (1,) * len(eqn.params["start_indices"])
    if starts[claim.dim] != 0 or strides[claim.dim] != 1:
        return None
    column = claim.column
    return claim if column is None else claim._replace(at=starts[column] + claim.at * strides[column])


def _moved(eqn: jex.JaxprEqn, claim: _Claim, source: dict[int, int]) -> _Claim | None:
    """The claim about the operand, of which dimension ``source[dim]`` became ``dim``."""
    operand, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
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
    operand, indices = (atom.aval.shape for atom in eqn.invars[:2])
    _, dropped, index_map, _, batching = eqn.params["dimension_numbers"]
    free = [dim for dim in range(len(indices) - 1) if dim not in batching]
    chosen: dict[int, tuple[int, int]] = {}
    for component, dim in enumerate(index_map):
        if dim not in dropped or operand[dim] == 1:
            continue
        for other in (other for other in free if indices[other] == operand[dim]):
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


@dataclass
class _Canonicalizer:
    """Rewrites the jaxpr of one scope; indices that several equations share are cut once."""

    scope: _Scope
    eqns: list = field(default_factory=list)
    cut: dict = field(default_factory=dict)

    def run(self) -> jex.ClosedJaxpr:
        closed, changed = self.scope.jaxpr, False
        for eqn in open_jaxpr(closed).eqns:
            rewritten = self._batched(eqn) if eqn.primitive.name in _INDEXED else self._with_regions(eqn)
            changed |= rewritten is not eqn
            self.eqns.append(rewritten)
        return jex.ClosedJaxpr(open_jaxpr(closed).replace(eqns=self.eqns), closed_consts(closed)) if changed else closed

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
        operand, indices, *updates = eqn.invars
        numbers = _with_batching(eqn.params["dimension_numbers"], list(chosen.values()))
        key = (indices, tuple(chosen))
        if key not in self.cut:
            self.cut[key] = self._without(eqn, indices, chosen)
        return eqn.replace(
            invars=[operand, self.cut[key], *updates],
            params={**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False},
        )

    def _without(self, eqn: jex.JaxprEqn, indices: jex.Var, components: Container[int]):
        """``indices`` less some components: what else was concatenated, or slices of them."""
        last = len(indices.aval.shape) - 1
        made, _ = self.scope.definitions.get(indices, (None, 0))
        joined = made is not None and made.primitive.name == "concatenate" and made.params["dimension"] == last
        pieces, first = [], 0
        for atom in made.invars if made is not None and joined else [indices]:
            kept = [at for at in range(atom.aval.shape[last]) if first + at not in components]
            whole = len(kept) == atom.aval.shape[last]
            pieces += [atom] if whole else [self._slice(eqn, atom, at, at + 1) for at in kept]
            first += atom.aval.shape[last]
        pieces = pieces or [self._slice(eqn, indices, 0, 0)]
        if len(pieces) == 1:
            return pieces[0]
        width = sum(atom.aval.shape[last] for atom in pieces)
        return self._compute(eqn, primitives.concatenate_p, pieces, {"dimension": last}, width)

    def _slice(self, eqn: jex.JaxprEqn, atom, start: int, stop: int):
        """Positions ``start`` to ``stop`` along the last dimension."""
        *batch, _ = atom.aval.shape
        starts, stops = (*[0] * len(batch), start), (*batch, stop)
        params = {"start_indices": starts, "limit_indices": stops, "strides": None}
        return self._compute(eqn, primitives.slice_p, [atom], params, stop - start)

    def _compute(self, eqn: jex.JaxprEqn, primitive: jex.Primitive, operands: list, params: dict, width: int):
        """Adds an equation on behalf of ``eqn``; its result is that long in the last dimension."""
        shape = (*operands[0].aval.shape[:-1], width)
        result = new_var(jax.core.ShapedArray(shape, operands[0].aval.dtype))
        made = jex.new_jaxpr_eqn(operands, [result], primitive, params, jex.no_effects, eqn.source_info, eqn.ctx)
        self.eqns.append(made)
        return result
