"""``lax.platform_dependent``: of the branches, only the one for the devices that the step runs on is ever lowered."""

from typing import Any

from jax.extend import core as jex
from jax.extend.core.primitives import closed_call_p

from jax_deepcompile.ir.primitives import CONTROL_FLOW, Cond
from jax_deepcompile.ir.rewrite import Walk
from jax_deepcompile.ir.traversal import inline_calls


def with_branches_chosen(closed: jex.ClosedJaxpr, platform: str) -> jex.ClosedJaxpr:
    """``closed`` with the branch for ``platform`` alone; as it is where there is none, which JAX refuses.

    Kernels for other devices, which cannot be lowered for these, are among what is left out.

    Before, on ``cuda``::

        i = platform_index[platforms=(("tpu",), None)]; y = cond[branches=(kernel, dot)] i x

    After::

        y = dot x x
    """
    called = _called(closed, platform)
    return closed if called is closed else inline_calls(called)


def _called(closed: Any, platform: str) -> Any:
    walk = Walk(closed, lambda region: _called(region, platform), CONTROL_FLOW)
    walk.eqns += [_chosen(eqn, platform) for eqn in walk]
    return walk.result()


def _chosen(eqn: jex.JaxprEqn, platform: str) -> jex.JaxprEqn:
    """A call of the one branch."""
    if eqn.primitive.name != "cond":
        return eqn
    pairs = zip(Cond(eqn).closed_branches, Cond(eqn).platforms, strict=False)
    chosen = next((branch for branch, platforms in pairs if platforms is None or platform in platforms), None)
    if chosen is None:
        return eqn
    params = {"call_jaxpr": chosen}
    return jex.new_jaxpr_eqn(Cond(eqn).operands, eqn.outvars, closed_call_p, params, chosen.effects, eqn.source_info)
