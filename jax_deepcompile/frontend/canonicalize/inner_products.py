"""Inner products of whole arrays: ``jnp.vdot`` puts both in a row, where only a leading dimension can be split."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex

from jax_deepcompile.frontend.canonicalize.equations import Rewrite, with_equations


def without_ravel(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with such products summed over the dimensions that their operands had before both were reshaped alike.

    Before::

        r = reshape[new_sizes=(32,)] x:f32[4,8]; s = reshape[new_sizes=(32,)] y:f32[4,8]
        dot_general[dimension_numbers=(([0], [0]), ([], []))] r s

    After, with ``r`` and ``s`` dead::

        dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] x y
    """
    return with_equations(closed, _rewrite_in)


def _rewrite_in(jaxpr: jex.Jaxpr) -> Rewrite:
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def before_reshape(atom: Any) -> Any:
        made = None if isinstance(atom, jex.Literal) else makers.get(atom)
        plain = made is not None and made.primitive.name == "reshape" and made.params["dimensions"] is None
        return made.invars[0] if made is not None and plain else atom

    def rewrite(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        if eqn.primitive.name != "dot_general":
            return eqn
        result: Any = eqn.outvars[0].aval
        (left, right), _ = eqn.params["dimension_numbers"]
        sources = [before_reshape(atom) for atom in eqn.invars]
        x, y = (source.aval.shape for source in sources)
        reshaped = all(source is not atom for source, atom in zip(sources, eqn.invars, strict=True))
        if result.shape or not reshaped or tuple(left) != tuple(right) or x != y:
            return eqn
        dims = tuple(range(len(x)))
        return eqn.replace(invars=sources, params={**eqn.params, "dimension_numbers": ((dims, dims), ((), ()))})

    return rewrite
