"""Broadcasts that JAX moved out of loops, for no iteration changes them, are made in the loops that read them.

Differentiation does that where nothing is checkpointed: a mask as large as the scores of attention, or what takes their
place where it hides them, would be read from memory in every iteration, though a kernel makes it from next to nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from jax_deepcompile.frontend.canonicalize.counting import shape_of
from jax_deepcompile.ir.primitives import ELEMENTWISE, VIEWS, Scan, closed_like
from jax_deepcompile.ir.rewrite import Walk, with_regions


def with_broadcasts_inside(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with no constant of a ``scan`` that is the broadcast of something smaller, or made of such alone.

    Before::

        m:bool[8,16,64,64] = broadcast_in_dim[broadcast_dimensions=(2, 3)] n:bool[64,64]
        t:bool[8,16,64,64] = broadcast_in_dim[broadcast_dimensions=()] True
        a:bool[8,16,64,64] = and t m
        scan[jaxpr={ lambda ; b:bool[8,16,64,64] c. let ... }] a d

    After, with ``a`` dead unless others read it::

        u:bool[64,64] = broadcast_in_dim[broadcast_dimensions=()] True
        s:bool[64,64] = and u n
        scan[jaxpr={ lambda ; e:bool[64,64] c. let b = broadcast_in_dim[broadcast_dimensions=(2, 3)] e; ... }] s d
    """
    walk, known, made = Walk(closed), dict[Any, _Spread](), set[Any]()
    for eqn in walk:
        if (spread := _spread(eqn, known)) is not None:
            known[eqn.outvars[0]] = spread
        for each in _moved(eqn, known, made):
            walk.eqns.append(with_regions(each, with_broadcasts_inside))
    return walk.result()


@dataclass(frozen=True)
class _Spread:
    """A value that is a broadcast.

    Attributes:
      eqn: makes it of something smaller.
      first: makes that, where nothing has yet.
    """

    eqn: jex.JaxprEqn
    first: tuple[jex.JaxprEqn, ...] = ()

    @property
    def source(self) -> Any:
        return self.eqn.invars[0]


def _spread(eqn: jex.JaxprEqn, known: dict[Any, _Spread]) -> _Spread | None:
    """Of what broadcast the result of ``eqn`` is; None if of none."""
    if eqn.primitive.name in ELEMENTWISE - VIEWS:
        return _alike(eqn, known)
    if eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) > 1:
        return None
    (source,) = eqn.invars
    before, after = (math.prod(shape_of(atom)) for atom in (source, eqn.outvars[0]))
    return _Spread(eqn) if before < after or (isinstance(source, jex.Var) and source in known) else None


def _alike(eqn: jex.JaxprEqn, known: dict[Any, _Spread]) -> _Spread | None:
    """The broadcast of what ``eqn`` makes of smaller arrays; None where its operands are no broadcasts alike."""
    result, values = eqn.outvars[0], [atom for atom in eqn.invars if isinstance(atom, jex.Var)]
    like = next((known[atom] for atom in values if atom in known), None)
    spreads = {} if like is None else {atom: _operand(atom, result, known, like) for atom in values}
    found = [each for each in spreads.values() if each is not None]
    if not found or len(found) < len(spreads):
        return None
    model = max(found, key=lambda each: math.prod(shape_of(each.source)))
    shape, first, operands = shape_of(model.source), list[jex.JaxprEqn](), list[Any]()
    for atom in eqn.invars:
        each = spreads.get(atom) if isinstance(atom, jex.Var) else None
        if each is None:
            operands.append(atom)
            continue
        first += each.first
        if shape_of(each.source) == shape and each.eqn.params == model.eqn.params:
            operands.append(each.source)
        elif shape_of(each.source) == ():
            filled = _broadcast(each.eqn, each.source, _variable(shape, each.source), ())
            first.append(filled)
            operands += filled.outvars
        else:
            return None
    made = _variable(shape, result)
    first.append(eqn.replace(invars=operands, outvars=[made]))
    return _Spread(model.eqn.replace(invars=[made], outvars=[result]), tuple(first))


def _operand(atom: Any, result: Any, known: dict[Any, _Spread], like: _Spread) -> _Spread | None:
    """Of what an operand is a broadcast to the shape of the result; None if of nothing smaller."""
    shape, wanted = shape_of(atom), shape_of(result)
    if shape == wanted:
        return known.get(atom)
    if len(shape) != len(wanted):
        return None
    return _Spread(_broadcast(like.eqn, atom, result, tuple(range(len(wanted)))))  # where its sizes are 1


def _broadcast(like: jex.JaxprEqn, source: Any, result: Any, dims: tuple[int, ...]) -> jex.JaxprEqn:
    """``like``, of other values."""
    params = like.params | {"shape": shape_of(result), "broadcast_dimensions": dims}
    return like.replace(invars=[source], outvars=[result], params=params)


def _moved(eqn: jex.JaxprEqn, known: dict[Any, _Spread], made: set[Any]) -> Iterator[jex.JaxprEqn]:
    """A loop with all broadcasts that it reads made inside, after what they are of, unless that is ``made``."""
    while eqn.primitive.name == "scan":
        loop = Scan(eqn)
        consts = enumerate(loop.operands.consts)
        place = next((place for place, atom in consts if isinstance(atom, jex.Var) and atom in known), None)
        if place is None:
            break
        spread = known[eqn.invars[place]]
        for each in spread.first:
            if made.isdisjoint(each.outvars):
                made.update(each.outvars)
                yield each
        invars = list(loop.body.invars)
        inside = spread.eqn.replace(invars=[_variable(shape_of(spread.source), spread.source)], outvars=[invars[place]])
        invars[place] = inside.invars[0]
        body = loop.body.replace(invars=invars, eqns=[inside, *loop.body.eqns])
        operands = [*eqn.invars[:place], spread.source, *eqn.invars[place + 1 :]]
        eqn = eqn.replace(invars=operands, params=eqn.params | {"jaxpr": closed_like(loop.closed, body)})
    yield eqn


def _variable(shape: tuple[int, ...], like: Any) -> Any:
    """A new one, of the type of ``like``."""
    return jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(shape, like.aval.dtype)).jaxpr.invars[0]
