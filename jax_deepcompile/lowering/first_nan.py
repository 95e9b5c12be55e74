"""Where the first value that is no number comes from: a step on whole arrays, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import bind, closed_consts, open_jaxpr, user_line


def is_looked_for() -> bool:
    """Whether JAX was told to look for values that are no numbers."""
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def without_nans(closed: jex.ClosedJaxpr, values: Sequence) -> list:
    """What ``closed`` makes of arrays.

    Raises:
      FloatingPointError: an operation makes what JAX was told to look for; it names the operation and the user's line.
    """
    jaxpr = open_jaxpr(closed)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed_consts(closed), *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        try:
            made = bind(eqn, list(map(read, eqn.invars)))
        except FloatingPointError as error:
            raise FloatingPointError(f"{error} at {user_line(eqn)}") from None
        known |= zip(eqn.outvars, made, strict=True)
    return list(map(read, jaxpr.outvars))
