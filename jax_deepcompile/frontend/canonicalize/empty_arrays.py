"""Arrays without elements, which ``jnp.pad`` puts at both ends of every dimension, are not waited for."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend import core as jex
from jax.extend.core import primitives

from jax_deepcompile.ir.primitives import ADDITIONS, CONTROL_FLOW
from jax_deepcompile.ir.rewrite import Walk

_ZERO_OF_ZEROS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "slice"})
"""What only puts zeros elsewhere."""


def without_empty_arrays(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with nothing made of arrays that have no elements; inside loops and branches too.

    To partitioning rules they are arrays like any other: an empty one in front of a batch seems to shift its examples.
    Results keep every bit, but -0.0 may stay where adding nothing made 0.0 of it. Calls should be inlined. Where all
    arrays have elements ``closed`` itself comes back.

    Before::

        b:f32[0,3] = slice[limit_indices=(0, 3) start_indices=(0, 0)] a
        c:f32[4,3] = concatenate[dimension=0] b a
        d:f32[0,3] e:f32[4,3] = split[axis=0 sizes=(0, 4)] c
        f:f32[4,3] = pad[padding_config=((0, 4, 0), (0, 0, 0))] d 0.0
        g:f32[4,3] = add_any e f

    After::

        g:f32[4,3] = a
    """
    walk = _Walk(closed, without_empty_arrays)
    for eqn in walk:
        walk.eqns += walk.rewritten(eqn)
    return walk.result()


@dataclass
class _Walk(Walk):
    """One that knows which variables are zero everywhere."""

    zeros: set = field(default_factory=set)

    def rewritten(self, eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
        """What to compute in the place of ``eqn``."""
        name = eqn.primitive.name
        if name == "concatenate" and not _is_empty(eqn.outvars[0]):
            return self._concatenated(eqn)
        if name == "split":
            return self._split(eqn)
        if name in ADDITIONS and any(map(self._is_zero, eqn.invars)):
            kept = next((atom for atom in eqn.invars if not self._is_zero(atom)), eqn.invars[0])
            return self._renamed(eqn.outvars[0], kept) if _shape(kept) == _shape(eqn.outvars[0]) else [eqn]
        if self._makes_zeros(eqn):
            self.zeros.add(eqn.outvars[0])
            return [self._constant(eqn, eqn.outvars[0])]
        return [eqn]

    def _concatenated(self, eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
        pieces = [atom for atom in eqn.invars if _shape(atom)[eqn.params["dimension"]]]
        if len(pieces) == len(eqn.invars):
            return [eqn]
        return self._renamed(eqn.outvars[0], pieces[0]) if len(pieces) == 1 else [eqn.replace(invars=pieces)]

    def _split(self, eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
        empty = [var for var in eqn.outvars if not _shape(var)[eqn.params["axis"]]]
        pieces = [var for var in eqn.outvars if var not in empty]
        if not empty or not pieces:
            return [eqn]
        sizes = tuple(_shape(var)[eqn.params["axis"]] for var in pieces)
        split = eqn.replace(outvars=pieces, params={**eqn.params, "sizes": sizes})
        rest = [split] if len(pieces) > 1 else self._renamed(pieces[0], eqn.invars[0])
        return [*rest, *(self._constant(eqn, var) for var in empty)]

    def _makes_zeros(self, eqn: jex.JaxprEqn) -> bool:
        """Whether the only result of ``eqn`` has no elements, or has zeros because of operands that have none."""
        if len(eqn.outvars) != 1 or not eqn.invars or eqn.effects or not _is_number(eqn.outvars[0]):
            return False
        name, first = eqn.primitive.name, eqn.invars[0]
        if _is_empty(eqn.outvars[0]):
            return name not in CONTROL_FLOW and name != "optimization_barrier"
        if name == "reduce_sum" or (name == "pad" and _is_positive_zero(eqn.invars[1])):
            return _is_empty(first) or self._is_zero(first)
        return name in _ZERO_OF_ZEROS and self._is_zero(first)

    def _is_zero(self, atom: Any) -> bool:
        return not isinstance(atom, jex.Literal) and atom in self.zeros

    def _constant(self, eqn: jex.JaxprEqn, var: Any) -> jex.JaxprEqn:
        dtype = var.aval.dtype
        zero = jex.Literal(np.zeros((), dtype), core.ShapedArray((), dtype))
        params = {"shape": _shape(var), "broadcast_dimensions": (), "sharding": None}
        return jex.new_jaxpr_eqn([zero], [var], primitives.broadcast_in_dim_p, params, jex.no_effects, eqn.source_info)

    def _renamed(self, var: Any, atom: Any) -> list[jex.JaxprEqn]:
        self.names[var] = atom
        return []


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _is_empty(atom: Any) -> bool:
    return 0 in _shape(atom)


def _is_positive_zero(atom: Any) -> bool:
    """Whether ``atom`` is a literal with no bit set."""
    return isinstance(atom, jex.Literal) and not any(np.asarray(atom.val).tobytes())


def _is_number(var: Any) -> bool:
    return any(jnp.issubdtype(var.aval.dtype, kind) for kind in (np.number, np.bool_))
