"""Collectives along the leading dimension.

XLA:GPU runs gathers and reduce-scatters along the most major dimension of the layout. Inside one computation it lays
values out to suit; what a loop carries has the default layout, and would be transposed in memory in every iteration.
A transpose in the program, on the other side of the carry, costs nothing: matrix products read and write either
order.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import abstract_array, new_var
from jax_deepcompile.ir.primitives import COLLECTIVES, Collective, Scan
from jax_deepcompile.ir.rewrite import Walk


def collectives_along_leading_dimension(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """``jaxpr`` with every tiled gather and reduce-scatter along dimension 0.

    Before::

        g = reduce_scatter[scatter_dimension=1] p

    After::

        q = transpose[permutation=(1, 0)] p
        r = reduce_scatter[scatter_dimension=0] q
        g = transpose[permutation=(1, 0)] r
    """
    walk = Walk(jaxpr)
    for eqn in walk:
        walk.eqns += _along_leading(eqn)
    return walk.result()


def scan_along_leading_dimension(eqn: Any) -> Any:
    """A scan with a body of the same inputs and outputs, whose collectives are along dimension 0."""
    return Scan(eqn).with_body(collectives_along_leading_dimension(Scan(eqn).body))


def _along_leading(eqn: Any) -> list:
    dimension = Collective(eqn).dimension if eqn.primitive.name in COLLECTIVES else None
    if not dimension:
        return [eqn]
    (operand,), (result,) = eqn.invars, eqn.outvars
    rest = [other for other in range(operand.aval.ndim) if other != dimension]
    forth = (dimension, *rest)
    back = tuple(forth.index(position) for position in range(len(forth)))
    before, between = _like(operand, forth), _like(result, forth)
    return [
        _transpose(operand, before, forth, eqn),
        Collective(eqn).along(0, [before], [between]),
        _transpose(between, result, back, eqn),
    ]


def _like(atom: Any, permutation: tuple[int, ...]) -> jex.Var:
    return new_var(abstract_array(tuple(atom.aval.shape[dim] for dim in permutation), atom.aval.dtype))


def _transpose(operand: Any, result: Any, permutation: tuple[int, ...], like: Any) -> Any:
    params = {"permutation": permutation}
    return jex.new_jaxpr_eqn([operand], [result], lax.transpose_p, params, jex.no_effects, like.source_info)
