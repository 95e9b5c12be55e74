"""A step that names an axis it is not mapped over, as those for ``jax.pmap`` do, is alone along it.

It sees the whole batch, so that what it would sum or average over devices is summed or averaged already.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_deepcompile._jax_compat import bound_axes, open_jaxpr, provenance
from jax_deepcompile.ir.primitives import NAMES_AXES, axis_names
from jax_deepcompile.ir.rewrite import Walk, abstract, renamed, with_regions, with_renamed_operands
from jax_deepcompile.ir.traversal import equations, inline_calls

_UNBOUND = re.compile(r"unbound axis name: (.+?)(?:\. To fix|$)")


def trace_alone(fun: Callable, shapes: Sequence) -> tuple[Any, Any, tuple[str, ...]]:
    """``fun`` traced along axes of one for all that it names and nothing around it has.

    Returns:
      Its jaxpr, the shapes of what it returns, and the names of those axes.

    Raises:
      NameError: such an axis has no text for a name, or is named together with dimensions of a ``vmap``.
    """
    names: list[str] = []
    while True:
        try:
            axes = [(name, 1) for name in names]
            jaxpr, out_shape = jax.make_jaxpr(fun, axis_env=axes, return_shape=True)(*shapes)
        except NameError as error:
            found = _UNBOUND.search(str(error))
            if found is None or found[1] in names:
                raise
            names.append(found[1])
        else:
            return _without(inline_calls(jaxpr), names) if names else jaxpr, out_shape, tuple(names)


def axes_around(jaxpr: Any) -> set[str]:
    """The axes that ``jaxpr`` names of what maps the function that is traced here."""
    around = bound_axes()
    return set().union(*map(_named, equations(jaxpr))).intersection(around) if around else set()


def _without(jaxpr: Any, names: Collection[str]) -> Any:
    """``jaxpr``, whose calls are inlined, with what a device does along ``names`` if it is the only one."""
    walk = Walk(jaxpr)
    for eqn in walk:
        axes = _named(eqn)
        if eqn.primitive.name == "shard_map":  # which has axes of its own, perhaps of the same name
            unbound = set(names).difference(eqn.params["mesh"].axis_names)
            inside = _without(eqn.params["jaxpr"], unbound)
            walk.eqns.append(eqn.replace(params={**eqn.params, "jaxpr": inside}))
            continue
        if axes.isdisjoint(names):
            walk.eqns.append(with_regions(eqn, functools.partial(_without, names=names)))
            continue
        if others := axes.difference(names):
            raise NameError(f"unbound axis name: {min(axes.intersection(names))}, together with {tuple(others)}")
        with provenance(eqn):
            own = open_jaxpr(jax.make_jaxpr(functools.partial(_by_itself, eqn))(*map(abstract, eqn.invars)))
        given = dict(zip(own.invars, eqn.invars, strict=True))
        walk.eqns += [with_renamed_operands(each, given) for each in own.eqns]
        walk.names |= {var: renamed(out, given) for var, out in zip(eqn.outvars, own.outvars, strict=True)}
    return walk.result()


def _named(eqn: Any) -> set:
    """The axes that ``eqn`` communicates over, or asks about."""
    return set(axis_names(eqn)) if eqn.primitive.name in NAMES_AXES else set()


def _by_itself(eqn: Any, *operands: jax.Array) -> list[jax.Array]:
    """What a collective gives a device that is the only one: its own part."""
    outs = [var.aval for var in eqn.outvars]
    sends = eqn.primitive.name != "ppermute" or (0, 0) in eqn.params["perm"]
    if not operands or not sends:
        return [jnp.zeros(out.shape, out.dtype) for out in outs]
    return [jnp.reshape(operand, out.shape) for operand, out in zip(operands, outs, strict=True)]
