"""Loops whose number of trips XLA cannot see, and so leaves as they are.

XLA doubles the body of every loop it can count (``xla_gpu_enable_while_loop_double_buffering``). Layer loops need
that: what they carry then changes buffers without a copy. Around them it would double the whole program, and its
memory.

Before::

    scan[length=16]: ...

After::

    n = optimization_barrier 16
    while i < n: ...

Guarantees: values are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jax_deepcompile._jax_compat import eval_local, scan_counts
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import replace_equations


def hide_trip_counts(program: Program, mesh: AnyMesh, loops: Sequence[str]) -> Program:
    """``program`` with the named scans as loops of unknown length; the same object if none is named."""
    depths = sorted({name.count("/") for name in loops}, reverse=True)
    for depth in depths:
        chosen = [loop for loop in find_loops(program.jaxpr) if loop.name in loops and loop.name.count("/") == depth]
        program = replace_equations(program, mesh, {id(loop.eqn): _as_while for loop in chosen})
    return program


def _as_while(eqn, operands: list) -> list:
    num_consts, num_carry = scan_counts(eqn)
    closed, length, reverse = eqn.params["jaxpr"], eqn.params["length"], eqn.params["reverse"]
    consts, carry, stacks = (
        operands[:num_consts],
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
    )
    bound = lax.optimization_barrier(jnp.int32(length))

    def body(state):
        trip, carry, out = state
        place = length - 1 - trip if reverse else trip
        slices = [lax.dynamic_index_in_dim(stack, place, keepdims=False) for stack in stacks]
        results = eval_local(closed, [*consts, *carry, *slices])
        out = [
            lax.dynamic_update_index_in_dim(whole, one, place, 0)
            for whole, one in zip(out, results[num_carry:], strict=True)
        ]
        return trip + 1, results[:num_carry], out

    out = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars[num_carry:]]
    _, carry, out = lax.while_loop(lambda state: state[0] < bound, body, (jnp.int32(0), list(carry), out))
    return [*carry, *out]
