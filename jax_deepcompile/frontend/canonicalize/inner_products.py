"""Inner products of whole arrays: ``jnp.vdot`` puts both in a row, where only a leading dimension can be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend import core as jex


def without_ravel(eqn: jex.JaxprEqn, maker: Callable[[Any], tuple[jex.JaxprEqn | None, int]]) -> jex.JaxprEqn:
    """``eqn`` summed over the dimensions that its operands had before both were reshaped alike.

    Before::

        r = reshape[new_sizes=(32,)] x:f32[4,8]; s = reshape[new_sizes=(32,)] y:f32[4,8]
        dot_general[dimension_numbers=(([0], [0]), ([], []))] r s

    After, with ``r`` and ``s`` dead::

        dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] x y

    Args:
      eqn: any equation; others than such products come back as they are.
      maker: the equation that a value comes from, and which of its results it is.
    """
    if eqn.primitive.name != "dot_general":
        return eqn
    result: Any = eqn.outvars[0].aval
    (left, right), _ = eqn.params["dimension_numbers"]
    sources = [_before_reshape(atom, maker) for atom in eqn.invars]
    x, y = (source.aval.shape for source in sources)
    reshaped = all(source is not atom for source, atom in zip(sources, eqn.invars, strict=True))
    if result.shape or not reshaped or tuple(left) != tuple(right) or x != y:
        return eqn
    dims = tuple(range(len(x)))
    return eqn.replace(invars=sources, params={**eqn.params, "dimension_numbers": ((dims, dims), ((), ()))})


def _before_reshape(atom: Any, maker: Callable[[Any], tuple[jex.JaxprEqn | None, int]]) -> Any:
    made, _ = maker(atom)
    plain = made is not None and made.primitive.name == "reshape" and made.params["dimensions"] is None
    return made.invars[0] if made is not None and plain else atom
