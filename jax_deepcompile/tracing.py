"""From the user's step to a global-view program."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core as jex
from jax.extend.core import primitives as _primitives  # noqa: F401

from jax_deepcompile import _jax_compat
from jax_deepcompile._jax_compat import closed_consts, new_var, open_jaxpr

_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that compute the jaxpr in the parameter named here, once, on their operands."""


def inline(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """``closed`` with every call replaced by what it calls, loops and branches included."""
    return _Inliner().closed(closed)


class _Inliner:
    def __init__(self) -> None:
        self.constvars: list = []
        self.consts: list = []
        self.eqns: list = []

    def closed(self, closed):
        jaxpr = open_jaxpr(closed)
        self.constvars, self.consts = list(jaxpr.constvars), list(closed_consts(closed))
        env = {}
        outs = self._walk(jaxpr, env)
        flat = jaxpr.replace(constvars=self.constvars, eqns=self.eqns, outvars=outs)
        return jex.ClosedJaxpr(flat, self.consts)

    def _walk(self, jaxpr, env) -> list:
        def read(atom):
            return atom if isinstance(atom, jex.Literal) else env.get(atom, atom)
        for eqn in jaxpr.eqns:
            operands = [read(a) for a in eqn.invars]
            name = eqn.primitive.name
            if name in _CALLS:
                inner = eqn.params[_CALLS[name]]
                body = open_jaxpr(inner)
                sub = dict(zip(body.invars, operands))
                for v, c in zip(body.constvars, closed_consts(inner)):
                    nv = new_var(v.aval); self.constvars.append(nv); self.consts.append(c); sub[v]=nv
                outs = self._walk_fresh(body, sub)
                env.update(zip(eqn.outvars, outs))
            else:
                nv = [v if _jax_compat.is_drop_var(v) else new_var(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, nv))
                self.eqns.append(eqn.replace(invars=operands, outvars=nv))
        return [read(a) for a in jaxpr.outvars]
    _walk_fresh = _walk
