"""Batched ``while`` loops: every element has a condition of its own, and the loop goes on until all are false.

``jax.vmap`` leaves such loops where the condition depends on what is mapped; only lowering gives them a meaning.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import eval_local, provenance
from jax_deepcompile.ir.primitives import While, WhileInputs
from jax_deepcompile.ir.rewrite import Walk


def with_one_condition(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with one condition for all elements of each loop.

    Before, with ``p: bool[B]``::

        while(x): p = cond(x); x = body(x)

    After::

        while(x): any(cond(x)); x = select(cond(x), body(x), x)
    """
    walk = Walk(closed, with_one_condition)
    walk.eqns += map(_rewritten, walk)
    return walk.result()


def _rewritten(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    loop = While(eqn)
    if eqn.primitive.name != "while" or not loop.condition.outvars[0].aval.shape:
        return eqn
    tested, read, carry = loop.operands

    def condition(*operands) -> list:
        (going,) = eval_local(loop.closed_condition, operands)
        return [lax.reduce_or_p.bind(going, axes=tuple(range(going.ndim)))]

    def body(*operands) -> list:
        tested, read, old = loop.split(operands)
        (going,) = eval_local(loop.closed_condition, [*tested, *old])
        new = eval_local(loop.closed_body, [*read, *old])
        dims = tuple(range(going.ndim))
        each = zip(new, old, strict=True)
        return [lax.select_n(lax.broadcast_in_dim(going, new.shape, dims), old, new) for new, old in each]

    with provenance(eqn):
        closed = _traced(condition, [*tested, *carry]), _traced(body, eqn.invars)
    return loop.having(*closed, WhileInputs(tested, [*tested, *read], carry))


def _traced(fun: Any, atoms: Sequence) -> Any:
    return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms))
