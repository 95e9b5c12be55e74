"""Broadcasts that JAX moved out of loops, for no iteration changes them, are made in the loops that read them.

Differentiation does that where nothing is checkpointed: a mask as large as the scores of attention, or what takes their
place where it hides them, would be read from memory in every iteration, though a kernel makes it from next to nothing.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import new_var
from jax_deepcompile.frontend.canonicalize.counting import shape_of
from jax_deepcompile.ir.primitives import ELEMENTWISE, VIEWS, Scan, closed_like
from jax_deepcompile.ir.rewrite import Walk, with_regions, with_renamed_operands


def with_broadcasts_inside(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with no constant of a ``scan`` that is the broadcast of something smaller, or made of such alone.

    Before::

        m:bool[8,16,64,64] = broadcast_in_dim[broadcast_dimensions=(2, 3)] n:bool[64,64]
        a:bool[8,16,64,64] = not m
        scan[jaxpr={ lambda ; b:bool[8,16,64,64] c. let ... }] a d

    After, with ``m`` and ``a`` dead unless others read them::

        scan[jaxpr={ lambda ; e:bool[64,64] c. let
            f:bool[8,16,64,64] = broadcast_in_dim[broadcast_dimensions=(2, 3)] e
            b:bool[8,16,64,64] = not f
            ... }] n d

    Nothing is written otherwise than it was: a loop that computes the same by itself, as the backward one of
    checkpointed layers does, is still seen to.
    """
    walk, known = Walk(closed), dict[Any, _Spread]()
    for eqn in walk:
        if (spread := _spread(eqn, known)) is not None:
            known[eqn.outvars[0]] = spread
        walk.eqns.append(with_regions(_with_spreads_inside(eqn, known), with_broadcasts_inside))
    return walk.result()


@dataclass(frozen=True)
class _Spread:
    """A value that is a broadcast.

    Attributes:
      source: what it is a broadcast of: a variable, or a literal where it is made of such alone.
      eqns: what makes it, in order, the last one the value itself.
    """

    source: Any
    eqns: tuple[jex.JaxprEqn, ...] = ()


def _spread(eqn: jex.JaxprEqn, known: Mapping[Any, _Spread]) -> _Spread | None:
    """Of what one smaller thing the result of ``eqn`` is a broadcast; None if of none, or of more."""
    is_broadcast = eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1
    if not is_broadcast and eqn.primitive.name not in ELEMENTWISE - VIEWS:
        return None
    size, read = math.prod(shape_of(eqn.outvars[0])), list[_Spread]()
    for atom in eqn.invars:
        if isinstance(atom, jex.Var) and atom in known:
            read.append(known[atom])
        elif math.prod(shape_of(atom)) < size and (is_broadcast or isinstance(atom, jex.Var)):
            read.append(_Spread(atom))  # of an elementwise operation, what has sizes of 1
        elif isinstance(atom, jex.Var):
            return None
    sources = dict.fromkeys(each.source for each in read if isinstance(each.source, jex.Var))
    if not read or len(sources) > 1:
        return None
    before = {id(made): made for each in read for made in each.eqns}
    return _Spread(next(iter(sources), read[0].source), (*before.values(), eqn))


def _with_spreads_inside(eqn: jex.JaxprEqn, known: Mapping[Any, _Spread]) -> jex.JaxprEqn:
    """A loop with all broadcasts that it reads made inside; any other equation as it is."""
    if eqn.primitive.name != "scan":
        return eqn
    loop = Scan(eqn)
    operands, invars, eqns = list(eqn.invars), list(loop.body.invars), list[jex.JaxprEqn]()
    for place, atom in enumerate(loop.operands.consts):
        if isinstance(atom, jex.Var) and atom in known:
            operands[place] = known[atom].source
            variable = new_var(operands[place].aval)
            eqns += _made_of(known[atom], variable, invars[place])
            invars[place] = variable
    if not eqns:
        return eqn
    body = loop.body.replace(invars=invars, eqns=[*eqns, *loop.body.eqns])
    return eqn.replace(invars=operands, params=eqn.params | {"jaxpr": closed_like(loop.closed, body)})


def _made_of(spread: _Spread, source: Any, result: Any) -> Iterator[jex.JaxprEqn]:
    """The equations of ``spread`` that make ``result``, with new variables between the two."""
    names = {spread.source: source} if isinstance(spread.source, jex.Var) else {}
    for eqn in spread.eqns:
        inside, (old,) = with_renamed_operands(eqn, names), eqn.outvars
        names[old] = result if eqn is spread.eqns[-1] else new_var(old.aval)
        yield inside.replace(outvars=[names[old]])
