"""How the loops around pipelined ones run: their trip counts hidden from XLA, forward beside backward where that helps.

XLA doubles the body of every loop that it can count (``xla_gpu_enable_while_loop_double_buffering``): what layer loops
carry then changes buffers without a copy. Around them it would double the whole program, and its memory.

Before::

    scan[length=16]: ...

After::

    n = optimization_barrier 16
    while i < n: ...

Guarantees: values are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.ir.iterations import Iterations, run_with_hidden_trip_count
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute
from jax_deepcompile.transforms.decision import Decision, loop_named, refused, replace_loops
from jax_deepcompile.transforms.overlap_microbatches import overlapped


@dataclass(frozen=True)
class MicrobatchLoop(Decision, kind="microbatch_loops", about=("loop",)):
    """How one loop around others runs.

    Attributes:
      loop: the loop.
      overlap: whether the next iteration's forward pass runs beside this one's backward pass.
    """

    loop: str
    overlap: bool = False

    def check(self, program: Program) -> None:
        loop = loop_named(program, self.loop, "says how to run")
        if not any(other.is_inside(loop) for other in find_loops(program)):
            raise refused(f"it says how to run {self.loop!r}, which has no loops in it")

    def describe(self) -> str:
        how = "forward of the next iteration beside backward" if self.overlap else "XLA does not see its trip count"
        return f"{self.loop}: {how}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[MicrobatchLoop]) -> Program:
        ways = {each.loop: overlapped if each.overlap else hidden_trip_count for each in decisions}
        return replace_loops(program, mesh, ways)


def hidden_trip_count(_: Loop) -> Compute:
    """The way to run a ``scan`` as a loop of unknown length."""

    def run(eqn, operands: list) -> list:
        loop = Iterations.of(eqn, operands)

        def body(turn, state):
            carry, outputs = state
            results = eval_local(Scan(eqn).closed, [*loop.consts, *carry, *loop.slices(turn)])
            carry, made = Scan(eqn).split_results(results)
            return carry, loop.written(outputs, turn, made)

        carry, outputs = run_with_hidden_trip_count(loop.length, body, (loop.carry, loop.outputs()))
        return [*carry, *outputs]

    return run
