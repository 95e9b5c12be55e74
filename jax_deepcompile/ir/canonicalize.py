"""Gathers and scatters that spell a batch dimension out as an index are written with a batching dimension instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend.core import primitives

from jax_deepcompile._jax_compat import closed_consts, new_var, open_jaxpr


def canonicalize(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with implicit batch dimensions of gathers and scatters made explicit, inside loops and branches too.

    ``logits[jnp.arange(B), labels]`` reads row ``b`` at position ``labels[b]``, and its gradient adds into the same
    place. To JAX both components of the index are numbers like any other, so that a device seems to need every row. Where
    a component provably counts along a dimension of the index batch that is as long as the operand's dimension, the two
    become a pair of batching dimensions and the component is dropped. Results keep every bit; what remains of the index
    is out of bounds where it was before, and ``unique_indices`` says what it said, as rows count as part of an index.
    Expects calls to be inlined; returns ``closed`` itself where there is nothing to do.

    Before::

        { lambda ; a:f32[8,16] b:i32[8,1]. let
            c:i32[8,1] = iota[dimension=0 dtype=int32 shape=(8, 1) sharding=None]
            d:i32[8,2] = concatenate[dimension=1] c b
            e:f32[8] = gather[
              dimension_numbers=GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1),
                start_index_map=(0, 1), operand_batching_dims=(), start_indices_batching_dims=())
              slice_sizes=(1, 1) ...
            ] a d
          in (e,) }

    After, the iota and the concatenation being dead::

        { lambda ; a:f32[8,16] b:i32[8,1]. let
            e:f32[8] = gather[
              dimension_numbers=GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(1,),
                start_index_map=(1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,))
              slice_sizes=(1, 1) ...
            ] a b
          in (e,) }
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
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        return False
    array = np.asarray(value)
    if claim.column is not None:
        array = np.take(array, [claim.at], claim.column)
    expected = np.expand_dims(np.arange(array.shape[claim.dim]), [d for d in range(array.ndim) if d != claim.dim])
    return bool(np.all(array == expected))


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
            return 0, _sliced(claim, params["start_indices"], params["strides"] or (1,) * len(params["start_indices"]))
        case "broadcast_in_dim":
            return 0, _moved(eqn, claim, {dim: source for source, dim in enumerate(params["broadcast_dimensions"])})
        case "transpose":
            return 0, _moved(eqn, claim, dict(enumerate(params["permutation"])))
        case "reshape" | "squeeze" if params.get("dimensions") is None or eqn.primitive.name == "squeeze":
            return 0, _moved(eqn, claim, _unit_dims_apart(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape))
    return 0, None


def _is_false(condition, number, scope: _Scope) -> bool:
    """Whether ``condition`` is that ``number``, which counts from 0, is negative, or is a constant that never holds."""
    if condition in scope.constants:
        value = scope.constants[condition]
        return not isinstance(value, jax.core.Tracer) and not np.any(value)
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


def _sliced(claim: _Claim, starts: Sequence[int], strides: Sequence[int]) -> _Claim | None:
    if starts[claim.dim] != 0 or strides[claim.dim] != 1:
        return None
    if claim.column is None:
        return claim
    return claim._replace(at=starts[claim.column] + claim.at * strides[claim.column])


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


class _Fields(NamedTuple):
    """What gather and scatter call the same things in their dimension numbers."""

    index_map: str
    dropped: str
    index_batching: str


_GATHER = _Fields("start_index_map", "collapsed_slice_dims", "start_indices_batching_dims")
_SCATTER = _Fields("scatter_dims_to_operand_dims", "inserted_window_dims", "scatter_indices_batching_dims")
_FIELDS = {"gather": _GATHER} | dict.fromkeys(
    ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _SCATTER
)


def _choose_batching(eqn: jex.JaxprEqn, scope: _Scope) -> dict[int, tuple[int, int]]:
    """For each component of the index that counts: the operand's dimension and the one of the index batch it follows."""
    operand, indices = (atom.aval.shape for atom in eqn.invars[:2])
    numbers, names = eqn.params["dimension_numbers"], _FIELDS[eqn.primitive.name]
    chosen: dict[int, tuple[int, int]] = {}
    free = set(range(len(indices) - 1)) - set(getattr(numbers, names.index_batching))
    for component, dim in enumerate(getattr(numbers, names.index_map)):
        if dim not in getattr(numbers, names.dropped) or operand[dim] < 2:
            continue
        for other in sorted(free):
            claim = _Claim(other, len(indices) - 1, component)
            if indices[other] == operand[dim] and _holds(claim, eqn.invars[1], scope):
                chosen[component] = (int(dim), other)
                free.remove(other)
                break
    return chosen


@dataclass
class _Canonicalizer:
    """Rewrites the jaxpr of one scope; indices that several equations share are cut once."""

    scope: _Scope
    eqns: list = field(default_factory=list)
    cut: dict = field(default_factory=dict)

    def run(self) -> jex.ClosedJaxpr:
        closed = self.scope.jaxpr
        jaxpr = open_jaxpr(closed)
        changed = False
        for eqn in jaxpr.eqns:
            rewritten = self._batched(eqn) if eqn.primitive.name in _FIELDS else self._with_regions(eqn)
            changed |= rewritten is not eqn
            self.eqns.append(rewritten)
        return jex.ClosedJaxpr(jaxpr.replace(eqns=self.eqns), closed_consts(closed)) if changed else closed

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
        numbers, names = eqn.params["dimension_numbers"], _FIELDS[eqn.primitive.name]
        old = zip(numbers.operand_batching_dims, getattr(numbers, names.index_batching), strict=True)
        pairs = sorted([*old, *chosen.values()])
        now_batching = {dim for dim, _ in chosen.values()}
        changes = {
            names.index_map: [d for d in getattr(numbers, names.index_map) if d not in now_batching],
            names.dropped: [d for d in getattr(numbers, names.dropped) if d not in now_batching],
            "operand_batching_dims": [dim for dim, _ in pairs],
            names.index_batching: [other for _, other in pairs],
        }
        numbers = numbers._replace(**{name: tuple(map(int, dims)) for name, dims in changes.items()})
        return eqn.replace(
            invars=[eqn.invars[0], self._without(eqn, chosen), *eqn.invars[2:]],
            params={**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False},
        )

    def _without(self, eqn: jex.JaxprEqn, components: dict):
        """The indices of ``eqn`` without some components: what else was concatenated to them, or slices."""
        indices = eqn.invars[1]
        key = (indices, tuple(components))
        if key not in self.cut:
            made, _ = self.scope.definitions.get(indices, (None, 0))
            last = len(indices.aval.shape) - 1
            joined = made is not None and made.primitive.name == "concatenate" and made.params["dimension"] == last
            pieces, first = [], 0
            for atom in made.invars if joined else [indices]:
                width = atom.aval.shape[last]
                kept = [column for column in range(width) if first + column not in components]
                slices = [atom] if len(kept) == width else [self._column(eqn, atom, at, at + 1) for at in kept]
                pieces, first = pieces + slices, first + width
            self.cut[key] = self._concatenate(eqn, pieces) if pieces else self._column(eqn, indices, 0, 0)
        return self.cut[key]

    def _concatenate(self, eqn: jex.JaxprEqn, pieces: list):
        if len(pieces) == 1:
            return pieces[0]
        *batch, _ = pieces[0].aval.shape
        width = sum(atom.aval.shape[-1] for atom in pieces)
        return self._compute(eqn, primitives.concatenate_p, pieces, (*batch, width), {"dimension": len(batch)})

    def _column(self, eqn: jex.JaxprEqn, atom, start: int, stop: int):
        *batch, _ = atom.aval.shape
        params = {
            "start_indices": (*[0] * len(batch), start),
            "limit_indices": (*batch, stop),
            "strides": None,
        }
        return self._compute(eqn, primitives.slice_p, [atom], (*batch, stop - start), params)

    def _compute(self, eqn: jex.JaxprEqn, primitive: jex.Primitive, operands: list, shape: tuple, params: dict):
        """Adds an equation on behalf of ``eqn``."""
        result = new_var(jax.core.ShapedArray(shape, operands[0].aval.dtype))
        made = jex.new_jaxpr_eqn(operands, [result], primitive, params, jex.no_effects, eqn.source_info, eqn.ctx)
        self.eqns.append(made)
        return result
