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

from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.analysis.loops import Loop
from jax_deepcompile.ir.iterations import Iterations, run_with_hidden_trip_count
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.retrace import Compute


def hidden_trip_count(_: Loop) -> Compute:
    """The way to run a ``scan`` as a loop of unknown length."""
    return _as_while


def _as_while(eqn, operands: list) -> list:
    loop = Iterations.of(eqn, operands)
    num_carry = len(loop.carry)

    def body(turn, state):
        carry, outputs = state
        results = eval_local(Scan(eqn).closed, [*loop.consts, *carry, *loop.slices(turn)])
        return results[:num_carry], loop.written(outputs, turn, results[num_carry:])

    carry, outputs = run_with_hidden_trip_count(loop.length, body, (loop.carry, loop.outputs()))
    return [*carry, *outputs]
