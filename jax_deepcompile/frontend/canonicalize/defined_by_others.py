"""Primitives that partitioning has no rule for, but whose authors wrote them in terms of others, for eager calls.

Such are those of sparse arrays, JAX's ``HiPrimitive``s (``jnp.searchsorted`` from 0.12 on) and many of libraries: what
they are made of has rules, and is divided.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core.primitives import closed_call_p

from jax_deepcompile._jax_compat import provenance
from jax_deepcompile.ir.primitives import CONTROL_FLOW
from jax_deepcompile.ir.rewrite import Walk, abstract
from jax_deepcompile.ir.traversal import equations, inline_calls


def with_others_written_out(closed: jex.ClosedJaxpr, has_rule: Callable[[str], bool]) -> jex.ClosedJaxpr:
    """``closed`` with these primitives replaced by what defines them; others without a rule stay.

    Before::

        s = unvmap_any m:bool[8]

    After::

        s = reduce_or[axes=(0,)] m
    """
    called = _called(closed, has_rule)
    return closed if called is closed else inline_calls(called)


def _called(closed: Any, has_rule: Callable[[str], bool]) -> Any:
    walk = Walk(closed, lambda region: _called(region, has_rule), CONTROL_FLOW)
    walk.eqns += [eqn if has_rule(eqn.primitive.name) else _written_out(eqn, has_rule) for eqn in walk]
    return walk.result()


def _written_out(eqn: jex.JaxprEqn, has_rule: Callable[[str], bool]) -> jex.JaxprEqn:
    """A call of what defines ``eqn``; itself if that is compiled code, or calls anything but JAX with its operands."""
    if eqn.effects:
        return eqn
    params, shapes = eqn.primitive.get_bind_params(eqn.params), map(abstract, eqn.invars)
    definition = vars(eqn.primitive).get("to_lojax", eqn.primitive.impl)
    try:
        with provenance(eqn):
            body = inline_calls(jax.make_jaxpr(lambda *operands: definition(*operands, **params))(*shapes), eqn)
    except Exception:  # of code that was not written to be traced
        return eqn
    is_itself = any(each.primitive is eqn.primitive for each in equations(body))
    if is_itself or _types(body.jaxpr.outvars) != _types(eqn.outvars):
        return eqn
    params = {"call_jaxpr": _called(body, has_rule)}
    return jex.new_jaxpr_eqn(eqn.invars, eqn.outvars, closed_call_p, params, jex.no_effects, eqn.source_info)


def _types(atoms: Sequence) -> list[tuple]:
    return [(atom.aval.shape, atom.aval.dtype) for atom in atoms]
