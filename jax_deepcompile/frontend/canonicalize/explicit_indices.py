"""Gathers and scatters that spell a batch dimension out as an index get a batching dimension instead."""

from collections.abc import Container, Sequence

from jax import core
from jax.extend import core as jex
from jax.extend.core import primitives

from jax_deepcompile._jax_compat import new_var
from jax_deepcompile.frontend.canonicalize.counting import Claim, Scope, holds, shape_of
from jax_deepcompile.ir.rewrite import Walk, with_regions


def without_explicit_indices(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
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
    return _Rewriter(Scope(closed)).run()


_INDEXED = frozenset({"gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
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
            return eqn
        numbers = _with_batching(eqn.params["dimension_numbers"], list(chosen.values()))
        params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        return eqn.replace(invars=[eqn.invars[0], self._indices_without(eqn, chosen), *eqn.invars[2:]], params=params)

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
        result = new_var(core.ShapedArray((*shape_of(operands[0])[:-1], width), operands[0].aval.dtype))
        origin = eqn.source_info, eqn.ctx
        self.walk.eqns.append(jex.new_jaxpr_eqn(operands, [result], primitive, params, jex.no_effects, *origin))
        return result
