"""What a jaxpr makes of nothing, such as counted indices, or of some of its values alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jax_deepcompile._jax_compat import eval_local, new_jaxpr
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.traversal import bodies, variables

Makers = Mapping[Any, Any]
"""For variables the equations that make them."""


def between(sources: Sequence[Any], results: Sequence[Any], makers: Makers) -> list | None:
    """The equations that make ``results`` of ``sources`` alone, in order; None if they are made of more."""
    needed: dict[int, Any] = {}
    known, waiting = set(sources), list(results)
    while waiting:
        var = waiting[-1]
        if var in known:
            waiting.pop()
            continue
        maker = makers.get(var)
        if maker is None or maker.effects or any(True for _ in bodies(maker)):
            return None
        missing = [atom for atom in variables(maker.invars) if atom not in known]
        if missing:
            waiting += missing
        else:
            needed[id(maker)] = maker
            known.update(maker.outvars)
    return list(needed.values())


def makers_inside(pairs: Iterable[tuple[Any, Any]], makers: Makers) -> dict[Any, Any]:
    """What makes, of nothing, the inputs that a body is given. Differentiation moves such equations out of loops.

    Args:
      pairs: an input each, and what it is outside.
      makers: outside.
    """
    inside: dict[Any, Any] = {}
    for var, atom in pairs:
        eqns = None if isinstance(atom, jex.Literal) else between([], [atom], makers)
        if eqns and len(eqns[-1].outvars) == 1:
            inside |= {made: eqn for eqn in eqns for made in eqn.outvars}
            inside[var] = eqns[-1].replace(outvars=[var])
    return inside


def values_of(results: Sequence[Any], makers: Makers, most_bytes: int, given: Mapping[Any, Any] | None = None) -> Any:
    """``results``, variables, as arrays; None if they are made of more than what is ``given``.

    Nor are they computed if one of the values on the way has more than ``most_bytes``.
    """
    given = given or {}
    eqns = between(list(given), results, makers)
    if eqns is None or any(size_bytes(var) > most_bytes for eqn in eqns for var in eqn.outvars):
        return None
    read = {*results, *(var for eqn in eqns for var in variables(eqn.invars))}
    inputs = [var for var in given if var in read]
    with jax.ensure_compile_time_eval():
        values = [jnp.asarray(given[var]) for var in inputs]
        return [np.asarray(made) for made in eval_local(new_jaxpr(inputs, list(results), eqns), values)]
