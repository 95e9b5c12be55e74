"""Inner products of whole arrays: ``jnp.vdot`` puts both in a row, where only a leading dimension can be split."""

from typing import Any

from jax.extend import core as jex

from jax_deepcompile.ir.rewrite import Walk


def without_ravel(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with such products summed over the dimensions that their operands had before both were reshaped alike.

    Before::

        r = reshape[new_sizes=(32,)] x:f32[4,8]; s = reshape[new_sizes=(32,)] y:f32[4,8]
        dot_general[dimension_numbers=(([0], [0]), ([], []))] r s

    After, with ``r`` and ``s`` dead::

        dot_general[dimension_numbers=(([0, 1], [0, 1]), ([], []))] x y
    """
    walk = Walk(closed, without_ravel)
    reshaped = {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in walk.jaxpr.eqns
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is None
    }
    walk.eqns += [_rewritten(eqn, reshaped) for eqn in walk]
    return walk.result()


def _rewritten(eqn: jex.JaxprEqn, reshaped: dict) -> jex.JaxprEqn:
    """``eqn`` without what was ``reshaped`` for it: values, and what they were before."""
    if eqn.primitive.name != "dot_general" or any(isinstance(atom, jex.Literal) for atom in eqn.invars):
        return eqn
    result: Any = eqn.outvars[0].aval
    (left, right), _ = eqn.params["dimension_numbers"]
    sources: list[Any] = [reshaped.get(atom) for atom in eqn.invars]
    if None in sources or result.shape or tuple(left) != tuple(right) or sources[0].aval.shape != sources[1].aval.shape:
        return eqn
    dims = tuple(range(len(sources[0].aval.shape)))
    return eqn.replace(invars=sources, params={**eqn.params, "dimension_numbers": ((dims, dims), ((), ()))})
