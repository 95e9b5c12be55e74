"""How often a ``while`` runs its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.ir.primitives import KEEPS_NUMBER, While
from jax_deepcompile.ir.rewrite import renamed


def known_counts(jaxpr: Any) -> dict:
    """The variables of a jaxpr that are constant whole numbers, behind a barrier perhaps."""
    flat = open_jaxpr(jaxpr)
    constants = zip(flat.constvars, closed_consts(jaxpr), strict=False)
    known = {var: int(value) for var, value in constants if _is_whole(var)}
    for eqn in flat.eqns:
        if eqn.primitive.name in KEEPS_NUMBER:
            counts = [_count(atom, known) for atom in eqn.invars]
            known.update((out, count) for out, count in zip(eqn.outvars, counts, strict=True) if count is not None)
    return known


def trips_of(eqn: Any, known: Mapping) -> int | None:
    """Trips of a ``while`` whose condition is ``counter < bound`` with a known bound; None of any other.

    The counter is taken to start at 0 and to go up by 1, as that of every ``fori_loop`` from 0 does.
    """
    loop = While(eqn)
    condition, num_cond = loop.condition, loop.num_cond_consts
    *casts, test = condition.eqns or [eqn]
    if test.primitive.name not in ("lt", "le") or any(cast.primitive.name not in KEEPS_NUMBER for cast in casts):
        return None
    made_of = {out: operand for cast in casts for out, operand in zip(cast.outvars, cast.invars, strict=True)}
    bound = renamed(test.invars[1], made_of)
    if bound in condition.invars[:num_cond]:
        bound = eqn.invars[condition.invars.index(bound)]
    elif bound in condition.invars:
        place = condition.invars.index(bound) - num_cond
        if loop.body.outvars[place] is not loop.body.invars[loop.num_body_consts + place]:
            return None
        bound = loop.operands.carry[place]
    trips = _count(bound, known)
    return None if trips is None else trips + (test.primitive.name == "le")


def _count(atom: Any, known: Mapping) -> int | None:
    if isinstance(atom, jex.Literal):
        return int(atom.val) if _is_whole(atom) else None
    return known.get(atom)


def _is_whole(atom: Any) -> bool:
    return not atom.aval.shape and jnp.issubdtype(atom.aval.dtype, jnp.integer)
