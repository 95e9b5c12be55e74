"""Steps that evaluate: they return nothing of their state, and make no new values of it either."""

from collections.abc import Collection
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.lineage import lineage, members
from jax_deepcompile.ir.primitives import MIXING
from jax_deepcompile.ir.traversal import nested_jaxprs, variables


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
    carried, (depends, mixed) = lineage(inner.replace(outvars=made)).carried, _dependence(inner)
    own = sum(1 << at for at in state)
    updated = {
        at
        for value, bits in zip(made, carried, strict=True)
        for at in members(bits & mixed[value] & own if depends[value] & ~own else 0)
        if _type(value) == _type(inner.invars[at])
    }
    needed = set(variables(inner.outvars))
    for eqn in reversed(inner.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
    read = {at for at in state if inner.invars[at] in needed}
    is_one_of_many = len(updated) == 1 and updated < read
    return bool(read) and (not updated or is_one_of_many)


def _dependence(jaxpr: jex.Jaxpr) -> tuple[dict[jex.Var, int], dict[jex.Var, int]]:
    """For each value the inputs that it depends on, as the bits of a number, and those of them through what mixes
    elements."""
    depends = {var: 1 << place for place, var in enumerate(jaxpr.invars)}
    mixed: dict[jex.Var, int] = {}
    for eqn in jaxpr.eqns:
        on = through = 0
        for atom in variables(eqn.invars):
            on |= depends.get(atom, 0)
            through |= mixed.get(atom, 0)
        if eqn.primitive.name in MIXING or nested_jaxprs(eqn):
            through = on
        depends |= dict.fromkeys(eqn.outvars, on)
        mixed |= dict.fromkeys(eqn.outvars, through)
    return depends, mixed


def _type(atom: Any) -> tuple:
    return atom.aval.shape, atom.aval.dtype
