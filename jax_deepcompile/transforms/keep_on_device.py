"""What a step copies to the host by itself, as policies of ``jax.checkpoint`` do, kept on the device.

Before, of a loop over layers checkpointed by ``save_and_offload_only_these_names``::

    scan(x, t): h = dot(x, W[t]); ... -> y, to_host(h)
    scan(g, t): ... to_device(h[t]) ...

After::

    scan(x, t): h = dot(x, W[t]); ... -> y, h
    scan(g, t): ... h[t] ...

Copies that a policy asks for are waited for, each in its layer: what does not fit goes to the host by decisions of the
plan, which copy ahead.

Guarantees: values are bitwise the same; arguments and results of the step stay in the memory where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.memory import is_fetch, is_offload, is_on_host
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import replace_equations
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.transforms.decision import Decision

_SAYS = "what the step copies to the host by itself stays on the device"


@dataclass(frozen=True)
class KeptOnDevice(Decision, kind="keep_on_device", says=_SAYS):
    """What the step has in the host's memory by itself, for as long as it runs, stays on the device."""

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[KeptOnDevice]) -> Program:
        return replace_equations(program, mesh, {id(eqn): _same for eqn in copies(program)})


def copies(program: Program) -> list[Any]:
    """The equations that copy values to the host and back; none where arguments or results are there."""
    flat = open_jaxpr(program.jaxpr)
    if any(map(is_on_host, (*flat.invars, *flat.outvars))):
        return []
    return [eqn for eqn in equations(program.jaxpr) if is_fetch(eqn) or is_offload(eqn)]


def _same(eqn: Any, operands: list) -> list:
    return operands
