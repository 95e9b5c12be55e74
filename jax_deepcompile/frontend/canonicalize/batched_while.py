"""Batched ``while`` loops: every element has a condition of its own, and the loop goes on until all are false.

``jax.vmap`` leaves such loops where the condition depends on what is mapped; only lowering gives them a meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, eval_local, open_jaxpr, provenance
from jax_deepcompile.frontend.canonicalize.equations import with_equations


def with_one_condition(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with one condition for all elements of each loop.

    Before, with ``p: bool[B]``::

        while(x): p = cond(x); x = body(x)

    After::

        while(x): any(cond(x)); x = select(cond(x), body(x), x)
    """
    return with_equations(closed, lambda jaxpr: _rewritten)


def _rewritten(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    if eqn.primitive.name != "while" or not open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0].aval.shape:
        return eqn
    params, conds = eqn.params, eqn.params["cond_nconsts"]
    body_first = conds + params["body_nconsts"]
    consts, carry = eqn.invars[:conds], eqn.invars[body_first:]

    def condition(*operands) -> list:
        (going,) = _run(params["cond_jaxpr"], operands)
        return [lax.reduce_or_p.bind(going, axes=tuple(range(going.ndim)))]

    def body(*operands) -> list:
        tested, rest, old = operands[:conds], operands[conds:body_first], operands[body_first:]
        (going,) = _run(params["cond_jaxpr"], [*tested, *old])
        new = _run(params["body_jaxpr"], [*rest, *old])
        return [_select(going, after, before) for after, before in zip(new, old, strict=True)]

    with provenance(eqn):
        bodies = {
            "cond_jaxpr": _traced(condition, [*consts, *carry]),
            "body_jaxpr": _traced(body, eqn.invars),
        }
    return eqn.replace(invars=[*consts, *eqn.invars], params={**params, **bodies, "body_nconsts": body_first})


def _run(closed: Any, operands: Sequence) -> list:
    return eval_local(open_jaxpr(closed), [*closed_consts(closed), *operands])


def _traced(fun: Any, atoms: Sequence) -> Any:
    return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms))


def _select(going: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    each = lax.broadcast_in_dim(going, new.shape, tuple(range(going.ndim)))
    return lax.select_n(each, old, new)
