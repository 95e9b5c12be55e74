"""Rewrites that look at one equation at a time."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.ir.traversal import with_regions

Rewrite = Callable[[jex.JaxprEqn], jex.JaxprEqn]


def with_equations(closed: jex.ClosedJaxpr, rewrite_in: Callable[[jex.Jaxpr], Rewrite]) -> jex.ClosedJaxpr:
    """``closed`` with every equation rewritten, then those in its loops and branches; itself if all stay.

    Args:
      closed: calls in it should be inlined.
      rewrite_in: makes the rewrite of the equations of one jaxpr.
    """
    jaxpr = open_jaxpr(closed)
    rewrite = rewrite_in(jaxpr)
    eqns = [with_regions(rewrite(eqn), lambda inner: with_equations(inner, rewrite_in)) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return closed
    return jex.ClosedJaxpr(jaxpr.replace(eqns=eqns), closed_consts(closed))
