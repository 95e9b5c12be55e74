"""Gathers and scatters that spell a batch dimension out as an index get a batching dimension instead."""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import core
from jax.extend import core as jex
from jax.extend.core import primitives

from jax_deepcompile._jax_compat import new_var
from jax_deepcompile.frontend.canonicalize.counting import Claim, Scope, holds, known_values, shape_of
from jax_deepcompile.ir.primitives import SCATTERS
from jax_deepcompile.ir.rewrite import Walk, with_regions


def without_explicit_indices(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with implicit batch dimensions of gathers and scatters made explicit, inside loops and branches too.

    ``logits[jnp.arange(B), labels]`` reads from row ``b`` at position ``labels[b]``, and its gradient adds there. To
    JAX the row is a number like any other, so that a device seems to need every row. Where a component of the index
    provably counts along a dimension of the index batch, and that is as long as the operand's dimension, the two become
    a pair of batching dimensions and the component is dropped. Results keep every bit: what remains of an index is out
    of bounds where it was, and as unique. So it is with an index that counts blocks, of several indices for each row in
    one dimension. Calls should be inlined. Without such an index ``closed`` itself comes back.

    Before::

        c:i32[8,1] = iota[dimension=0 dtype=int32 shape=(8, 1) sharding=None]
        d:i32[8,2] = concatenate[dimension=1] c b
        e:f32[8] = gather[dimension_numbers=GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1),
          start_index_map=(0, 1), operand_batching_dims=(), start_indices_batching_dims=()) ...] a d

    After, with ``c`` and ``d`` dead::

        e:f32[8] = gather[dimension_numbers=GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(1,),
          start_index_map=(1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,)) ...] a b
    """
    return _Rewriter(Scope(closed)).run()


_INDEXED = SCATTERS | {"gather"}
"""Their dimension numbers are five tuples that mean the same: those of the window, those dropped from the window, those
indexed by each component, and the batching dimensions of operand and indices."""


def _choose_batching(eqn: jex.JaxprEqn, scope: Scope) -> dict[int, tuple[int, int]]:
    """For each component that counts: the operand's dimension it indexes, the dimension of the index batch it is."""
    operand, indices = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    _, dropped, index_map, _, batching = eqn.params["dimension_numbers"]
    free = [dim for dim in range(len(indices) - 1) if dim not in batching]
    chosen: dict[int, tuple[int, int]] = {}
    for component, dim in enumerate(index_map):
        for other in [other for other in free if dim in dropped and indices[other] == operand[dim] > 1]:
            if holds(Claim(other, len(indices) - 1, component), eqn.invars[1], scope):
                chosen[component] = (dim, other)
                free.remove(other)
                break
    return chosen


class _Blocks(NamedTuple):
    """A component of an index that counts blocks: those of one length along a dimension of the index batch.

    Attributes:
      component: which.
      dim: the operand's dimension that it indexes.
      other: the dimension of the index batch.
      length: of a block.
    """

    component: int
    dim: int
    other: int
    length: int


def _choose_blocks(eqn: jex.JaxprEqn, scope: Scope) -> _Blocks | None:
    """One of several indices for each row, all in one dimension: ``arange(B * n) // n``."""
    operand, indices = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    _, dropped, index_map, _, batching = eqn.params["dimension_numbers"]
    for component, dim in enumerate(index_map):
        for other in range(len(indices) - 1):
            rows = operand[dim]
            if other in batching or dim not in dropped or rows < 2 or indices[other] % rows or indices[other] <= rows:
                continue
            known, length = known_values(eqn.invars[1], component, scope), indices[other] // rows
            if known is not None and bool((np.moveaxis(known, other, -1) == np.arange(indices[other]) // length).all()):
                return _Blocks(component, dim, other, length)
    return None


def _with_batching(numbers, added: Sequence[tuple[int, int]]):
    """Dimension numbers of a gather or scatter with more batching dimensions, in the operand's order as it must be."""
    window, dropped, index_map, operand_dims, index_dims = numbers
    pairs = sorted([*zip(operand_dims, index_dims, strict=True), *added])
    batching = [dim for dim, _ in pairs]
    dropped, index_map = ([dim for dim in dims if dim not in batching] for dims in (dropped, index_map))
    fields = (window, dropped, index_map, batching, [other for _, other in pairs])
    return type(numbers)(*(tuple(int(dim) for dim in dims) for dims in fields))


class _Rewriter:
    """Rewrites the jaxpr of one scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.walk = Walk(scope.jaxpr)

    def run(self) -> jex.ClosedJaxpr:
        for eqn in self.walk:
            rewritten = self._batched(eqn) if eqn.primitive.name in _INDEXED else self._with_regions(eqn)
            self.walk.eqns.append(rewritten)
        return self.walk.result()

    def _with_regions(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        inner = {id(scope.jaxpr): _Rewriter(scope) for scope in self.scope.regions(eqn)}
        return with_regions(eqn, lambda body: inner[id(body)].run()) if inner else eqn

    def _batched(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        chosen = _choose_batching(eqn, self.scope)
        if not chosen:
            blocks = _choose_blocks(eqn, self.scope)
            return eqn if blocks is None else self._in_blocks(eqn, blocks)
        numbers = _with_batching(eqn.params["dimension_numbers"], list(chosen.values()))
        params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        return eqn.replace(invars=[eqn.invars[0], self._indices_without(eqn, chosen), *eqn.invars[2:]], params=params)

    def _in_blocks(self, eqn: jex.JaxprEqn, blocks: _Blocks) -> jex.JaxprEqn:
        """``eqn`` with the dimension of the index batch in two, of which the first is a batching dimension."""
        window, *fields, batching = eqn.params["dimension_numbers"]
        divided: Any = eqn.outvars[0] if eqn.primitive.name == "gather" else eqn.invars[2]
        place = [dim for dim in range(len(shape_of(divided))) if dim not in window][blocks.other]
        window = tuple(dim + (dim > place) for dim in window)
        batching = tuple(dim + (dim > blocks.other) for dim in batching)
        numbers = type(eqn.params["dimension_numbers"])(window, *fields, batching)
        numbers = _with_batching(numbers, [(blocks.dim, blocks.other)])
        params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        indices = self._apart(eqn, self._indices_without(eqn, {blocks.component}), blocks.other, blocks.length)
        if eqn.primitive.name != "gather":
            updates = self._apart(eqn, divided, place, blocks.length)
            return eqn.replace(invars=[eqn.invars[0], indices, updates], params=params)
        found = new_var(core.ShapedArray(_apart(shape_of(divided), place, blocks.length), divided.aval.dtype))
        self.walk.eqns.append(eqn.replace(invars=[eqn.invars[0], indices], outvars=[found], params=params))
        together = {"new_sizes": shape_of(divided), "dimensions": None, "sharding": None}
        return eqn.replace(primitive=primitives.reshape_p, params=together, invars=[found])

    def _apart(self, eqn: jex.JaxprEqn, atom, dim: int, length: int):
        shape = _apart(shape_of(atom), dim, length)
        params = {"new_sizes": shape, "dimensions": None, "sharding": None}
        return self._add(eqn, primitives.reshape_p, params, [atom], shape)

    def _indices_without(self, eqn: jex.JaxprEqn, components: Container[int]):
        """The indices of ``eqn`` less some components: what else was concatenated, or slices of it."""
        indices = eqn.invars[1]
        last = len(shape_of(indices)) - 1
        made, _ = self.scope.maker(indices)
        joined = made is not None and made.primitive.name == "concatenate" and made.params["dimension"] == last
        pieces, first = [], 0
        for atom in made.invars if made is not None and joined else [indices]:
            width = shape_of(atom)[last]
            kept = [at for at in range(width) if first + at not in components]
            pieces += [atom] if len(kept) == width else [self._slice(eqn, atom, at, at + 1) for at in kept]
            first += width
        pieces = pieces or [self._slice(eqn, indices, 0, 0)]
        width = sum(shape_of(atom)[last] for atom in pieces)
        joining = primitives.concatenate_p, {"dimension": last}
        return pieces[0] if len(pieces) == 1 else self._compute(eqn, *joining, pieces, width)

    def _slice(self, eqn: jex.JaxprEqn, atom, start: int, stop: int):
        *batch, _ = shape_of(atom)
        limits = {"start_indices": (*[0] * len(batch), start), "limit_indices": (*batch, stop), "strides": None}
        return self._compute(eqn, primitives.slice_p, limits, [atom], stop - start)

    def _compute(self, eqn: jex.JaxprEqn, primitive: jex.Primitive, params: dict, operands: list, width: int):
        """Adds an equation on behalf of ``eqn``, whose result is that wide in the last dimension."""
        return self._add(eqn, primitive, params, operands, (*shape_of(operands[0])[:-1], width))

    def _add(self, eqn: jex.JaxprEqn, primitive: jex.Primitive, params: dict, operands: list, shape: tuple[int, ...]):
        result = new_var(core.ShapedArray(shape, operands[0].aval.dtype))
        origin = eqn.source_info, eqn.ctx
        self.walk.eqns.append(jex.new_jaxpr_eqn(operands, [result], primitive, params, jex.no_effects, *origin))
        return result


def _apart(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """``shape`` with a dimension as blocks and what is in them."""
    return *shape[:dim], shape[dim] // length, length, *shape[dim + 1 :]
