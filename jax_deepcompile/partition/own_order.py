"""Rows that are sorted among all examples, as tokens are by their experts: each device sorts its own.

A mixture of experts that drops no token sorts the tokens of all examples by expert, multiplies each expert's run of
rows with its matrix (``ragged_dot``), and puts the rows back where they were. To sort them all, every row leaves its
device. But what becomes of a row does not depend on where it is among the others. So rows are sorted in as many parts
as they are divided into, if nothing can tell: each goes its own way, they are summed over, or put back, and groups are
counted as they are sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import dce, open_jaxpr
from jax_deepcompile.ir.known_values import Makers, makers_inside
from jax_deepcompile.ir.placement import MeshAxes
from jax_deepcompile.ir.primitives import ELEMENTWISE, SCATTERS, Scan, closed_like
from jax_deepcompile.ir.ragged import RaggedProduct
from jax_deepcompile.ir.rewrite import Walk, in_place_of, with_regions
from jax_deepcompile.partition.counted_groups import are_counted
from jax_deepcompile.partition.ordered_rows import Order, Places, Rows, holds, is_uniform, merged, split
from jax_deepcompile.partition.rules.base import Dims, Kind, LocalEquation, OpRule
from jax_deepcompile.partition.rules.families import REGISTRY

_OF_EACH = ELEMENTWISE | {"broadcast_in_dim", "squeeze", "expand_dims"}
"""They compute of each element alone, and keep the order of elements."""


def with_own_order(closed: jex.ClosedJaxpr, parts: int) -> jex.ClosedJaxpr:
    """``closed``, global, with rows sorted in ``parts`` parts of the same length, inside loops too.

    Before and after, for two parts of three rows::

        keys, order = sort[dimension=0] k:i32[6] iota
        rows:f32[6,4] = gather x order

        keys, order = sort[dimension=1] k:i32[2,3] (iota + first row of each part)
        rows:f32[2,3,4] = gather x:f32[2,3,4] (order - first row of each part)
    """
    return _with_own_order(closed, parts, {})


def _with_own_order(closed: jex.ClosedJaxpr, parts: int, given: Makers) -> jex.ClosedJaxpr:
    """``given`` has the equations that make some inputs."""
    walk, makers = Walk(closed), dict(given)
    for eqn in walk:
        makers |= dict.fromkeys(eqn.outvars, eqn)
        walk.eqns.append(with_regions(eqn, partial(_with_own_order, parts=parts, given=_made_outside(eqn, makers))))
    changed = walk.result()
    jaxpr = open_jaxpr(changed)
    makers = dict(given) | {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    tried = [eqn for eqn in jaxpr.eqns if _sorts_rows(eqn, makers, parts)]
    while tried:
        try:
            return closed_like(changed, dce(_Level(jaxpr, makers, parts, frozenset(map(id, tried))).run()))
        except _MattersError as error:
            tried = [eqn for eqn in tried if eqn is not error.order.sort]
    return changed


def _made_outside(eqn: Any, makers: Makers) -> dict[Any, Any]:
    """The makers of constants that a loop's body is given."""
    if eqn.primitive.name != "scan":
        return {}
    return makers_inside(zip(Scan(eqn).inputs.consts, Scan(eqn).operands.consts, strict=True), makers)


def _sorts_rows(eqn: Any, makers: Makers, parts: int) -> bool:
    """Whether ``eqn`` sorts the numbers of rows by a whole number for each."""
    if eqn.primitive.name != "sort" or len(eqn.invars) != 2 or eqn.params["num_keys"] != 1:
        return False
    keys, numbers = (atom.aval for atom in eqn.invars)
    is_divided = len(keys.shape) == 1 and keys.shape[0] % parts == 0 and jnp.issubdtype(keys.dtype, jnp.integer)
    return is_divided and _is_iota(eqn.invars[1], makers) and holds(numbers.dtype, keys.shape[0])


def _is_iota(atom: Any, makers: Makers) -> bool:
    return not isinstance(atom, jex.Literal) and atom in makers and makers[atom].primitive.name == "iota"


class _MattersError(Exception):
    """Something depends on where rows are among all others."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order


@dataclass
class _Level:
    """One jaxpr in the making, its rows in parts from where they are sorted to where they are put back."""

    jaxpr: jex.Jaxpr
    makers: Makers
    parts: int
    chosen: frozenset[int]
    known: dict[Any, Rows | Places] = field(default_factory=dict)
    counted: dict[Any, bool] = field(default_factory=dict)
    eqns: list = field(default_factory=list)

    def run(self) -> jex.Jaxpr:
        """The new jaxpr.

        Raises:
          _MattersError: something cannot do with another order.
        """
        for eqn in self.jaxpr.eqns:
            found = [each for each in map(self._found, eqn.invars) if each is not None]
            if not found and id(eqn) in self.chosen:
                self._sort(eqn)
            elif found:
                self._compute(eqn, found[0].order)
            else:
                self.eqns.append(eqn)
        for found in filter(None, map(self._found, self.jaxpr.outvars)):
            raise _MattersError(found.order)
        return self.jaxpr.replace(eqns=self.eqns)

    def _found(self, atom: Any) -> Rows | Places | None:
        return None if isinstance(atom, jex.Literal) else self.known.get(atom)

    def _add(self, eqn: Any, compute: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any] = ()) -> list:
        """Equations in the place of ``eqn``. Their results, which are ``outputs`` where these are given."""
        eqns, results = in_place_of(eqn, compute, inputs, outputs)
        self.eqns += eqns
        return results

    def _sort(self, eqn: Any) -> None:
        order = Order(eqn)

        def in_parts(*each: jax.Array) -> Sequence[jax.Array]:
            return lax.sort_p.bind(*(split(one, self.parts) for one in each), **{**eqn.params, "dimension": 1})

        keys, rows = self._add(eqn, in_parts, eqn.invars)
        self.known[eqn.outvars[0]] = Rows(keys, 0, order)
        self.known[eqn.outvars[1]] = Rows(rows, 0, order, order.numbers(eqn.outvars[1].aval.dtype))

    def _compute(self, eqn: Any, order: Order) -> None:
        if any(found.order is not order for found in filter(None, map(self._found, eqn.invars))):
            raise _MattersError(order)
        ways = {"sort": self._sorted_back, "gather": self._gathered, "ragged_dot_general": self._multiplied}
        way = self._scattered if eqn.primitive.name in SCATTERS else ways.get(eqn.primitive.name)
        if way is not None and way(eqn, order):
            return
        if any(isinstance(self._found(atom), Places) for atom in eqn.invars):
            self._of_places(eqn, order)
        else:
            self._by_rule(eqn, order)

    def _sorted_back(self, eqn: Any, order: Order) -> bool:
        """``argsort(argsort(keys))``: where each row went. Sorted once more, that is the order again."""
        given = self._found(eqn.invars[0])
        if len(eqn.invars) != 2 or given is None or eqn.params["num_keys"] != 1 or not order.are_numbers(given.numbers):
            return False
        if eqn.invars[0].aval.ndim != 1 or not _is_iota(eqn.invars[1], self.makers):
            return False
        if not holds(eqn.invars[1].aval.dtype, order.length):
            return False
        first, place = eqn.outvars
        self._add(eqn, lambda: lax.iota(first.aval.dtype, order.length), [], [first])
        if isinstance(given, Places):
            self.known[place] = self.known[order.sort.outvars[1]]
            return True

        def back(rows: jax.Array) -> jax.Array:
            return lax.sort((rows, lax.broadcasted_iota(place.aval.dtype, rows.shape, 1)), dimension=1, num_keys=1)[1]

        (var,) = self._add(eqn, back, [given.var])
        self.known[place] = Places(var, order, order.numbers(place.aval.dtype))
        return True

    def _of_places(self, eqn: Any, order: Order) -> None:
        """What is computed of each place before it is looked up, such as what is done about negative ones."""
        found = list(filter(None, map(self._found, eqn.invars)))
        alone = eqn.primitive.name in _OF_EACH and all(isinstance(each, Places) for each in found)
        made = self._numbers(eqn) if alone else None
        if made is None:
            raise _MattersError(order)
        places: Any = found[0]
        self.known.update({var: replace(places, numbers=each) for var, each in zip(eqn.outvars, made, strict=True)})

    def _gathered(self, eqn: Any, order: Order) -> bool:
        operand, indices = map(self._found, eqn.invars)
        dim = _looked_up(eqn, eqn.params["dimension_numbers"].start_index_map)
        if indices is None or dim is None or eqn.params["slice_sizes"][dim] != 1:
            return False
        length, dims = eqn.invars[0].aval.shape[dim], range(eqn.outvars[0].aval.ndim)
        (row,) = (each for each in dims if each not in eqn.params["dimension_numbers"].offset_dims)
        if isinstance(indices, Places):
            if not order.are_numbers(indices.numbers) or not isinstance(operand, Rows) or operand.dim != dim:
                raise _MattersError(order)

            def put_back(rows: jax.Array, places: jax.Array) -> jax.Array:
                return merged(self._each(eqn)(rows, places[..., None]), row)

            self._add(eqn, put_back, [operand.var, indices.var], eqn.outvars)
            return True
        if operand is not None or not self._are_own(indices.numbers, length):
            return False

        def own(values: jax.Array, rows: jax.Array) -> jax.Array:
            return self._each(eqn)(split(values, self.parts, dim), self._within(rows, length))

        (var,) = self._add(eqn, own, [eqn.invars[0], indices.var])
        self.known[eqn.outvars[0]] = Rows(var, row, order)
        return True

    def _scattered(self, eqn: Any, order: Order) -> bool:
        operand, indices, updates = map(self._found, eqn.invars)
        numbers = eqn.params["dimension_numbers"]
        dim = _looked_up(eqn, numbers.scatter_dims_to_operand_dims)
        if indices is None or dim is None or dim not in numbers.inserted_window_dims or operand is not None:
            return False
        length = eqn.invars[0].aval.shape[dim]
        (row,) = (each for each in range(eqn.invars[2].aval.ndim) if each not in numbers.update_window_dims)
        if isinstance(indices, Places):
            uniform = length == order.length and self._is_uniform(eqn.invars[0], dim)
            if updates is not None or not uniform or not order.are_numbers(indices.numbers):
                raise _MattersError(order)

            def put_in_order(values: jax.Array, places: jax.Array, updates: jax.Array) -> jax.Array:
                blocks = split(values, self.parts, dim), places[..., None], split(updates, self.parts, row)
                return self._each(eqn)(*blocks)

            (var,) = self._add(eqn, put_in_order, [eqn.invars[0], indices.var, eqn.invars[2]])
            self.known[eqn.outvars[0]] = Rows(var, dim, order)
            return True
        if not self._are_own(indices.numbers, length):
            return False
        in_order = updates if isinstance(updates, Rows) and updates.dim == row else None
        if in_order is None and (updates is not None or not self._is_uniform(eqn.invars[2], row)):
            raise _MattersError(order)

        def own(values: jax.Array, rows: jax.Array, updates: jax.Array) -> jax.Array:
            blocks = updates if in_order else split(updates, self.parts, row)
            return merged(self._each(eqn)(split(values, self.parts, dim), self._within(rows, length), blocks), dim)

        self._add(eqn, own, [eqn.invars[0], indices.var, in_order.var if in_order else eqn.invars[2]], eqn.outvars)
        return True

    def _multiplied(self, eqn: Any, order: Order) -> bool:
        x, y, sizes = map(self._found, eqn.invars)
        product = RaggedProduct.of(eqn)
        if product is None or len(product.x_rows) > 1 or sizes is not None or not isinstance(x, Rows):
            return False
        ragged = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions[0]
        mine = isinstance(y, Rows) and y.dim in product.y_rows if product.sums_rows else y is None
        if x.dim != ragged or not mine or not self._are_counted(eqn.invars[2], order):
            raise _MattersError(order)

        def in_parts(x: jax.Array, y: jax.Array, keys: jax.Array) -> jax.Array:
            in_group = split(jnp.maximum(keys, 0), self.parts)[..., None] == lax.iota(keys.dtype, product.groups)
            sizes = jnp.sum(in_group, 1, eqn.invars[2].aval.dtype)
            numbers = _with_parts(eqn.params["ragged_dot_dimension_numbers"], product.sums_rows)
            return eqn.primitive.bind(x, y, sizes, **{**eqn.params, "ragged_dot_dimension_numbers": numbers})

        inputs = [x.var, eqn.invars[1] if y is None else y.var, order.keys]
        if product.sums_rows:
            self._add(eqn, in_parts, inputs, eqn.outvars)
        else:
            (var,) = self._add(eqn, in_parts, inputs)
            contracted = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][0]
            self.known[eqn.outvars[0]] = Rows(var, ragged - sum(dim < ragged for dim in contracted), order)
        return True

    def _are_counted(self, sizes: Any, order: Order) -> bool:
        if (sizes, order) not in self.counted:
            self.counted[sizes, order] = are_counted(sizes, order.keys, self.makers)
        return self.counted[sizes, order]

    def _by_rule(self, eqn: Any, order: Order) -> None:
        """What is computed of each row alone, or summed over rows."""
        found, rule = map(self._found, eqn.invars), REGISTRY.find(eqn)
        rows = [each if isinstance(each, Rows) else None for each in found]
        factor = _factor_of_rows(rule, rows, order) if isinstance(rule, OpRule) else None
        if not isinstance(rule, OpRule) or factor is None:
            raise _MattersError(order)
        dims = [_dim_of(factor, each) for each in rule.operands]
        for atom, each, dim in zip(eqn.invars, rows, dims, strict=True):
            if dim is not None and (each.dim != dim if each else not self._is_uniform(atom, dim)):
                raise _MattersError(order)
        sums = rule.factors[factor].kind is Kind.SUM
        computed = partial(self._by_parts, LocalEquation(eqn, rule, self._splits(rule, factor), self._mesh), rows, dims)
        summed = partial(_summed, computed, rule.addends)
        inputs = [atom if each is None else each.var for atom, each in zip(eqn.invars, rows, strict=True)]
        try:
            made = self._add(eqn, summed if sums else computed, inputs, eqn.outvars if sums else ())
        except (NameError, NotImplementedError):  # what asks which part it is depends on more than a row
            raise _MattersError(order) from None
        if sums:
            return
        numbers = self._numbers(eqn) or [None] * len(made)
        for var, new, factors, known in zip(eqn.outvars, made, rule.results, numbers, strict=True):
            dim = _dim_of(factor, factors)
            if dim is None or factors[dim] != (factor,):
                raise _MattersError(order)
            self.known[var] = Rows(new, dim, order, known)

    @property
    def _mesh(self) -> MeshAxes:
        """An axis that no equation finds: none may ask which part it computes."""
        return MeshAxes(("part",), (self.parts,))

    def _splits(self, rule: OpRule, factor: int) -> tuple[tuple[str, ...], ...]:
        return tuple(self._mesh.names if each == factor else () for each in range(len(rule.factors)))

    def _by_parts(
        self,
        local: LocalEquation,
        rows: Sequence[Rows | None],
        dims: Sequence[int | None],
        *values: jax.Array,
    ) -> Sequence[jax.Array]:
        """[parts, ...] of values that have rows in parts, are whole, or are alike for all rows of ``dims``."""

        def taken(value: jax.Array, dim: int | None) -> jax.Array:
            return value if dim is None else lax.slice_in_dim(value, 0, value.shape[dim] // self.parts, axis=dim)

        blocks = [value if each else taken(value, dim) for value, each, dim in zip(values, rows, dims, strict=True)]
        return jax.vmap(partial(local.rule.emit, local), [0 if each else None for each in rows])(*blocks)

    def _numbers(self, eqn: Any) -> list[np.ndarray] | None:
        """The results of ``eqn`` by the number, or the place, of a row; None if they depend on more."""
        operands = [self._number(atom) for atom in eqn.invars]
        return None if any(each is None for each in operands) else _evaluated(eqn, operands)

    def _number(self, atom: Any) -> Any:
        if isinstance(atom, jex.Literal):
            return atom.val
        if (found := self.known.get(atom)) is not None:
            return found.numbers
        maker = self.makers.get(atom)
        if maker is None or maker.primitive.name not in ELEMENTWISE | {"broadcast_in_dim"}:
            return None
        operands = [self._number(each) for each in maker.invars]
        made = None if any(each is None for each in operands) else _evaluated(maker, operands)
        return None if made is None else made[0]

    def _is_uniform(self, atom: Any, dim: int) -> bool:
        """Whether ``atom`` is alike all along ``dim``, as what is broadcast is."""
        return is_uniform(atom, dim, self.makers)

    def _are_own(self, numbers: np.ndarray | None, length: int) -> bool:
        """Whether each part looks up what is in the same part of ``length`` elements."""
        if numbers is None or length % self.parts:
            return False
        part = np.arange(self.parts).repeat(numbers.size // self.parts)
        return bool((numbers.reshape(-1) // (length // self.parts) == part).all())

    def _within(self, rows: jax.Array, length: int) -> jax.Array:
        """Indices [parts, ...] of ``length`` elements as those of a part's."""
        first = lax.broadcasted_iota(rows.dtype, rows.shape, 0) * (length // self.parts)
        return rows - first

    def _each(self, eqn: Any) -> Callable[..., jax.Array]:
        """``eqn`` for each part."""
        return jax.vmap(lambda *blocks: eqn.primitive.bind(*blocks, **eqn.primitive.get_bind_params(eqn.params)))


def _evaluated(eqn: Any, operands: Sequence[Any]) -> list[np.ndarray] | None:
    """The results of ``eqn``; None where numbers of all rows do not fit it."""
    with jax.ensure_compile_time_eval():
        values = [jnp.asarray(value, atom.aval.dtype) for value, atom in zip(operands, eqn.invars, strict=True)]
        if any(value.shape != atom.aval.shape for value, atom in zip(values, eqn.invars, strict=True)):
            return None
        made = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return list(map(np.asarray, made if eqn.primitive.multiple_results else [made]))


def _looked_up(eqn: Any, dims: Sequence[int]) -> int | None:
    """The dimension in which rows of indices look up one element each; None if they are more than that."""
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1].aval
    return dims[0] if len(dims) == 1 and not numbers.operand_batching_dims and len(indices.shape) == 2 else None


def _summed(
    by_parts: Callable[..., Sequence[jax.Array]], addends: Collection[int], *values: jax.Array
) -> Sequence[jax.Array]:
    """Sums over parts; what these are added to is added once."""
    each: Any = by_parts(*(jnp.zeros_like(value) if place in addends else value for place, value in enumerate(values)))
    totals = [jnp.sum(one, 0, one.dtype) for one in each]
    return [total + values[place] for total in totals for place in addends] or totals


def _factor_of_rows(rule: OpRule, rows: Sequence[Rows | None], order: Order) -> int | None:
    """The factor that rows are, in all operands; None if they are several, or cannot be divided."""
    found = {rule.operands[place][each.dim] for place, each in enumerate(rows) if each}
    if len(found) != 1 or len(next(iter(found))) != 1:
        return None
    ((factor,),) = found
    kind, size = rule.factors[factor].kind, rule.factors[factor].size
    is_divided = size == order.length and kind in (Kind.MAP, Kind.SUM) and factor not in rule.by_number
    return factor if is_divided else None


def _dim_of(factor: int, dims: Dims) -> int | None:
    return next((dim for dim, factors in enumerate(dims) if factor in factors), None)


def _with_parts(numbers: lax.RaggedDotDimensionNumbers, sums_rows: bool) -> lax.RaggedDotDimensionNumbers:
    """Of operands whose rows are in parts: in a dimension before all others."""
    (x_contracted, y_contracted), _ = numbers.dot_dimension_numbers
    x, y = [dim + 1 for dim in x_contracted], [dim + sums_rows for dim in y_contracted]
    contracted = ([0, *x], [0, *y]) if sums_rows else (x, y)
    ragged = [dim + 1 for dim in numbers.lhs_ragged_dimensions]
    return lax.RaggedDotDimensionNumbers((contracted, ((), ())), ragged, numbers.rhs_group_dimensions)
