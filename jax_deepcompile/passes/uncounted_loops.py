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

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_deepcompile._jax_compat import eval_local, scan_counts
from jax_deepcompile.analysis.loops import Loop
from jax_deepcompile.ir.retrace import Compute


def uncounted(_: Loop) -> Compute:
    """The way to run a ``scan`` as a loop of unknown length."""
    return _as_while


def _as_while(eqn, operands: list) -> list:
    num_consts, num_carry = scan_counts(eqn)
    closed, length, reverse = eqn.params["jaxpr"], eqn.params["length"], eqn.params["reverse"]
    consts, carry, stacks = (
        operands[:num_consts],
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
    )

    def body(trip, state):
        carry, out = state
        place = length - 1 - trip if reverse else trip
        slices = [lax.dynamic_index_in_dim(stack, place, keepdims=False) for stack in stacks]
        results = eval_local(closed, [*consts, *carry, *slices])
        out = [
            lax.dynamic_update_index_in_dim(whole, one, place, 0)
            for whole, one in zip(out, results[num_carry:], strict=True)
        ]
        return results[:num_carry], out

    out = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars[num_carry:]]
    carry, out = run_uncounted(length, body, (list(carry), out))
    return [*carry, *out]


def run_uncounted(trips: int, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """The state after ``body(trip, state) -> state`` ran ``trips`` times, from 0 on; XLA does not see how often."""
    bound = lax.optimization_barrier(jnp.int32(trips))

    def step(counted):
        trip, state = counted
        return trip + 1, body(trip, state)

    return lax.while_loop(lambda counted: counted[0] < bound, step, (jnp.int32(0), start))[1]
