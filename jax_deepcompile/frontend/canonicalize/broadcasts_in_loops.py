"""Broadcasts that JAX moved out of loops, for no iteration changes them, are made in the loops that read them.

Differentiation does that where nothing is checkpointed: a mask as large as the scores of attention, or what takes their
place where it hides them, would be read from memory in every iteration, though a kernel makes it from next to nothing.
"""

import math
from typing import Any

import jax
from jax.extend import core as jex

from jax_deepcompile.frontend.canonicalize.counting import shape_of
from jax_deepcompile.ir.primitives import Scan, closed_like
from jax_deepcompile.ir.rewrite import Walk, with_regions


def with_broadcasts_inside(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with no constant of a ``scan`` that is the broadcast of something smaller.

    Before::

        m:bool[8,16,64,64] = broadcast_in_dim[broadcast_dimensions=(2, 3)] n:bool[64,64]
        scan[jaxpr={ lambda ; a:bool[8,16,64,64] b. let ... }] m c

    After, with ``m`` dead unless others read it::

        scan[jaxpr={ lambda ; d:bool[64,64] b. let a = broadcast_in_dim[broadcast_dimensions=(2, 3)] d; ... }] n c
    """
    walk, broadcasts = Walk(closed), dict[Any, Any]()
    for eqn in walk:
        if eqn.primitive.name == "broadcast_in_dim" and _grows(eqn, broadcasts):
            broadcasts[eqn.outvars[0]] = eqn
        while (moved := _moved(eqn, broadcasts)) is not eqn:
            eqn = moved
        walk.eqns.append(with_regions(eqn, with_broadcasts_inside))
    return walk.result()


def _moved(eqn: jex.JaxprEqn, broadcasts: dict) -> jex.JaxprEqn:
    """The loop with the first of the ``broadcasts`` that it reads inside; itself if there is none."""
    if eqn.primitive.name != "scan":
        return eqn
    loop = Scan(eqn)
    for place, atom in enumerate(loop.operands.consts):
        if isinstance(atom, jex.Var) and atom in broadcasts:
            (source,) = broadcasts[atom].invars
            invars, body = list(loop.body.invars), loop.body
            inside = broadcasts[atom].replace(invars=[_variable(source.aval)], outvars=[invars[place]])
            invars[place] = inside.invars[0]
            body = body.replace(invars=invars, eqns=[inside, *body.eqns])
            operands = [*eqn.invars[:place], source, *eqn.invars[place + 1 :]]
            return eqn.replace(invars=operands, params=eqn.params | {"jaxpr": closed_like(loop.closed, body)})
    return eqn


def _variable(aval: Any) -> Any:
    """A new one."""
    return jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).jaxpr.invars[0]


def _grows(eqn: jex.JaxprEqn, broadcasts: dict) -> bool:
    """Whether a broadcast is of something smaller: of what it reads, or what that is a broadcast of."""
    source, *sizes = eqn.invars
    before, after = (math.prod(shape_of(atom)) for atom in (source, eqn.outvars[0]))
    return not sizes and (before < after or (isinstance(source, jex.Var) and source in broadcasts))
