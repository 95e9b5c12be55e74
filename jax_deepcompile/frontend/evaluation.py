"""Steps that evaluate: they return nothing of their state, and make no new values of it either."""

from collections.abc import Collection
from functools import reduce
from operator import or_
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.lineage import dependence, lineage, members


def evaluates(jaxpr: Any, state: Collection[int]) -> bool:
    """Whether the results of ``jaxpr`` are computed of ``state``, and it makes no new values of it.

    A new value carries on the old one, and depends on it through products or sums with what is no state as well: its
    gradient does. It need not be returned, or read by anything, as in a step that forgets it. Statistics of a batch
    depend on old ones in no other way, and averages or norms of parameters on no batch. One such value among others may
    be an activation: embeddings of nodes, to which layers add what they make of them.

    Args:
      jaxpr: with what it computes in vain, and its calls inlined.
      state: positions of inputs.
    """
    inner = open_jaxpr(jaxpr)
    types = {_type(inner.invars[at]) for at in state}
    made = [var for eqn in inner.eqns for var in eqn.outvars if _type(var) in types]
    values = inner.replace(outvars=made)
    own = sum(1 << at for at in state)
    updated = {
        at
        for value, carried, (depends, mixed) in zip(made, lineage(values).carried, dependence(values), strict=True)
        for at in members(carried & mixed & own if depends & ~own else 0)
        if _type(value) == _type(inner.invars[at])
    }
    read = set(members(own & reduce(or_, (depends for depends, _ in dependence(inner)), 0)))
    is_one_of_many = len(updated) == 1 and updated < read
    return bool(read) and (not updated or is_one_of_many)


def _type(atom: Any) -> tuple:
    return atom.aval.shape, atom.aval.dtype
