"""Values that little work makes of something smaller: of halves their floats, of small integers what they stand for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core as jex

from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import WIDENING
from jax_deepcompile.ir.traversal import variables

_WORTH = 0.75
"""The largest share of a value's bytes that what it is made of may have."""


@dataclass(frozen=True)
class Widened:
    """How a value is made of less.

    Attributes:
      eqns: that make it, in order.
      sources: what they make it of.
      free: what else they read, which it costs nothing to have.
    """

    eqns: tuple
    sources: tuple
    free: tuple


def widened(jaxpr: jex.Jaxpr, free: Collection = ()) -> dict[Any, Widened]:
    """By variables of ``jaxpr`` that are made of less, how they are.

    Args:
      free: inputs that it costs nothing to have, such as constants of a loop.
    """
    sources: dict[Any, tuple] = {var: () if var in free else (var,) for var in (*jaxpr.constvars, *jaxpr.invars)}
    makers: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        sources |= {var: (var,) for var in eqn.outvars}
        if eqn.primitive.name in WIDENING and _are_arrays([*eqn.invars, *eqn.outvars]):
            (var,) = eqn.outvars
            read = tuple(dict.fromkeys(source for atom in variables(eqn.invars) for source in sources[atom]))
            if sum(map(size_bytes, read)) < size_bytes(var):
                sources[var], makers[var] = read, eqn
    worth = [var for var in makers if sum(map(size_bytes, sources[var])) <= _WORTH * size_bytes(var)]
    return {var: _made(var, sources[var], makers) for var in worth}


def _made(result: Any, sources: tuple, makers: dict) -> Widened:
    needed, free, waiting = dict[Any, Any](), dict[Any, None](), [result]
    while waiting:
        var = waiting.pop()
        if var in makers and var not in sources:
            needed |= {var: makers[var]}
            waiting += (atom for atom in variables(makers[var].invars) if atom not in needed)
        elif var not in sources:
            free[var] = None
    return Widened(tuple(eqn for var, eqn in makers.items() if var in needed), sources, tuple(free))


def _are_arrays(atoms: list) -> bool:
    return all(isinstance(atom.aval.dtype, np.dtype) for atom in atoms)
