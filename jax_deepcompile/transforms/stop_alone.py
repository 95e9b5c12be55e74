"""Loops over examples end on each device when its own examples are done.

``vmap`` of a ``while`` goes on until no example does, and leaves those that are done as they are. A device whose
examples all are need not wait for the others, nor ask them after every iteration.

Before::

    while(x): pmax(any(cond(x)), "fsdp"); x = select(cond(x), body(x), x)

After::

    while(x): any(cond(x)); x = select(cond(x), body(x), x)

Guarantees: values are bitwise the same; loops that communicate otherwise, or change an example that is done, stay. So
do all loops where XLA divides what is in them further, along automatic axes, and communicates on its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import has_side_effects
from jax_deepcompile.analysis.equal_work import Numbers
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import COLLECTIVES, While, closed_like
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import Walk
from jax_deepcompile.ir.traversal import equations


def stop_alone(program: Program, mesh: AnyMesh) -> Program:
    """``program``, in the local view, with such loops; the same object if it has none."""
    if len(mesh.axis_names) > len(program.mesh.devices.names):
        return program
    return program.replace(jaxpr=_rewritten(program.jaxpr))


def _rewritten(closed: Any) -> Any:
    walk = Walk(closed, regions=_rewritten)
    walk.eqns += map(_alone, walk)
    return walk.result()


def _alone(eqn) -> Any:
    """``eqn`` with a condition of this device's own, if it is a ``while`` that may have one."""
    if eqn.primitive.name != "while" or has_side_effects(eqn):
        return eqn
    loop = While(eqn)
    condition = loop.condition
    combined = _maker(condition, condition.outvars[0], "pmax")
    here = combined and _maker(condition, combined.invars[0], "reduce_or")
    if not here or not _keeps_what_is_done(eqn, here.invars[0]):
        return eqn
    alone = condition.replace(eqns=[each for each in condition.eqns if each is not combined], outvars=here.outvars)
    return loop.having(closed_like(loop.closed_condition, alone), loop.closed_body, loop.operands)


def _keeps_what_is_done(eqn, going: Any) -> bool:
    """Whether the body does not communicate, and changes only elements of which the condition says that they go on."""
    condition, body = While(eqn).condition, While(eqn).body
    among = [each.primitive.name for each in (*equations(body), *equations(condition))]
    if sum(name in COLLECTIVES for name in among) != 1:
        return False
    conds, bodies = While(eqn).num_cond_consts, While(eqn).num_body_consts
    tested, given, carried = eqn.invars[:conds], eqn.invars[conds : conds + bodies], body.invars[bodies:]
    numbers = Numbers()
    inside = numbers.of_place(body)
    same = {var: inside[inner] for var, inner in zip(condition.invars[conds:], carried, strict=True)}
    consts = {id(atom): inside[inner] for inner, atom in zip(body.invars, given, strict=False)}
    pairs = zip(condition.invars[:conds], tested, strict=True)
    same |= {var: consts[id(atom)] for var, atom in pairs if id(atom) in consts}
    goes_on = numbers.of_atom(going, numbers.of_place(condition, same))
    masks = [var for var, number in inside.items() if number == goes_on]
    return all(
        new is old or _is_guarded(body, new, old, going, masks) for new, old in zip(body.outvars, carried, strict=True)
    )


def _is_guarded(body: jex.Jaxpr, new: Any, old: Any, going: Any, masks: Collection) -> bool:
    """Whether ``new`` differs from ``old`` only where ``going``, which is one of ``masks`` in the body, is true."""
    select = _maker(body, new, "select_n")
    if not select or len(select.invars) != 3 or select.invars[1] is not old:
        return False
    each, dims = select.invars[0], tuple(range(len(old.aval.shape)))
    rows = dims[: len(going.aval.shape)]
    while not (dims == rows and each in masks):
        broadcast = _maker(body, each, "broadcast_in_dim")
        if not broadcast:
            return False
        each, dims = broadcast.invars[0], tuple(dims[dim] for dim in broadcast.params["broadcast_dimensions"])
    return True


def _maker(jaxpr: jex.Jaxpr, atom: Any, name: str) -> Any:
    """The equation called ``name`` that makes ``atom`` and nothing else; None if another does."""
    return next((eqn for eqn in jaxpr.eqns if eqn.primitive.name == name and eqn.outvars == [atom]), None)
