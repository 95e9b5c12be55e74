"""Steps that evaluate: they return nothing of their state, and make no new values of it either."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.traversal import variables


def evaluates(jaxpr: Any, state: Sequence[int]) -> bool:
    """Whether the results of ``jaxpr`` are computed of ``state``, and no new value of it is computed in vain.

    A step that forgets to return its new state has values of the shapes of most of the old one that nothing needs.

    Args:
      jaxpr: with what it computes in vain, and its calls inlined.
      state: positions of inputs.
    """
    inner = open_jaxpr(jaxpr)
    needed, in_vain = set(variables(inner.outvars)), Counter[tuple[int, ...]]()
    for eqn in reversed(inner.eqns):
        in_vain.update(var.aval.shape for var in eqn.outvars if var not in needed)
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
    leaves = [inner.invars[at] for at in state]
    updated = 0
    for leaf in filter(_is_floating, leaves):
        is_made = in_vain[leaf.aval.shape] > 0
        in_vain[leaf.aval.shape] -= is_made
        updated += is_made * size_bytes(leaf)
    return not needed.isdisjoint(leaves) and 2 * updated < sum(map(size_bytes, filter(_is_floating, leaves)))


def _is_floating(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)
