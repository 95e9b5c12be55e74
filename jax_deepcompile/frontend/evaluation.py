"""Steps that evaluate: they return nothing of their state, and make no new values of it either."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.lineage import lineage, members
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.traversal import variables


def evaluates(jaxpr: Any, state: Sequence[int]) -> bool:
    """Whether the results of ``jaxpr`` are computed of ``state``, and no new value of it is computed in vain.

    A step that forgets to return its new state makes values that nothing reads, and that carry on what it reads itself;
    or, with gradients alone, that have the shapes of most of the state. Statistics of a batch that are made in vain do
    neither.

    Args:
      jaxpr: with what it computes in vain, and its calls inlined.
      state: positions of inputs.
    """
    inner = open_jaxpr(jaxpr)
    needed = set(variables(inner.outvars))
    read = {*needed, *variables(atom for eqn in inner.eqns for atom in eqn.invars)}
    for eqn in reversed(inner.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
    in_vain = [var for eqn in inner.eqns for var in eqn.outvars if var not in read]
    leaves = [at for at in state if jnp.issubdtype(inner.invars[at].aval.dtype, jnp.floating)]
    carried = lineage(inner.replace(outvars=in_vain)).carried
    updated = {
        at
        for value, bits in zip(in_vain, carried, strict=True)
        for at in members(bits)
        if _type(value) == _type(inner.invars[at]) and inner.invars[at] in needed
    }
    is_read = any(inner.invars[at] in needed for at in state)
    return is_read and updated.isdisjoint(leaves) and not _are_like_most(in_vain, [inner.invars[at] for at in leaves])


def _type(atom: Any) -> tuple:
    return atom.aval.shape, atom.aval.dtype


def _are_like_most(values: Sequence, leaves: Sequence) -> bool:
    """Whether ``values`` have the shapes of most of ``leaves``, by bytes."""
    shapes, alike_bytes = Counter(value.aval.shape for value in values), 0
    for leaf in leaves:
        is_alike = shapes[leaf.aval.shape] > 0
        shapes[leaf.aval.shape] -= is_alike
        alike_bytes += is_alike * size_bytes(leaf)
    return 2 * alike_bytes >= sum(map(size_bytes, leaves)) > 0
