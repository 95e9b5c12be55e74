"""What a forward loop keeps for the backward loop, in the host's memory meanwhile.

Before::

    s = scan(x, t): ... -> y, x
    scan(g, t): x = s[t]; ...

After::

    s = scan(x, t): ... -> y, to_host(x)
    scan(g, t): x = to_device(s[t]); ...

A pipelined backward loop copies a layer's values back one iteration ahead, as it gathers parameters.

Guarantees: values are bitwise the same; each is copied out once and back once; the device holds those of a few layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.analysis.loops import Loop, find_loops
from jax_deepcompile.analysis.residuals import Residual, residuals
from jax_deepcompile.ir.memory import DEVICE, HOST
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import rescan
from jax_deepcompile.transforms.decision import Decision, listed, loops_in_turn, positions, replace_loops


@dataclass(frozen=True)
class OffloadedActivations(
    Decision,
    kind="offload_activations",
    after=("rematerialize", "rematerialize_segments", "keep_activations"),
    on_host=True,
):
    """What one loop stacks for another one is in the host's memory between them.

    Attributes:
      forward: the loop that makes it.
      backward: a later loop in the same place, over as many layers, that alone reads it.
      values: what is stacked, by the scope that computes it.
    """

    forward: str
    backward: str
    values: tuple[str, ...]

    def describe(self) -> str:
        return f"{self.forward}: copies {listed(self.values, self.forward)} to the host for {self.backward}"

    def subjects(self) -> tuple[str, ...]:
        """Two loops together: one may leave stacks for several, as on the way down a U does for the way up and back."""
        return (f"{self.forward}, {self.backward}",)

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[OffloadedActivations]) -> Program:
        copying: dict[str, _Copying] = {}
        for each in decisions:
            forward, backward, chosen = _chosen(program, each)
            if chosen:
                made, read = {found.output for found in chosen}, {at for found in chosen for at in found.inputs}
                copying.setdefault(forward.name, _Copying()).outputs.update(made)
                copying.setdefault(backward.name, _Copying()).inputs.update(read)
        return replace_loops(program, mesh, {name: lambda loop, run=run: run for name, run in copying.items()})


def offloadable(program: Program, forward: Loop, backward: Loop) -> tuple[Residual, ...]:
    """What ``backward``, which comes later in the same place, reads of what ``forward`` stacks for it alone."""
    around = {loop.path: loop.scan.closed for loop in find_loops(program)} | {(): program.jaxpr}
    return residuals(around[forward.path[:-1]], forward, backward)


def _chosen(program: Program, choice: OffloadedActivations) -> tuple[Loop, Loop, list[Residual]]:
    what = "copies to the host what is made by", "copies to the host what is read by"
    forward, backward = loops_in_turn(program, choice.forward, choice.backward, what)
    known = offloadable(program, forward, backward)
    what = f"copies from {choice.forward!r} to the host for {choice.backward!r}"
    places = positions(choice.values, [each.name for each in known], what)
    return forward, backward, [known[place] for place in places]


@dataclass
class _Copying:
    """Runs a loop whose stacked ``outputs`` go to the host, and whose stacked ``inputs`` come from it, by position."""

    outputs: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)

    def __call__(self, eqn: Any, operands: list) -> list:
        scan = Scan(eqn)
        consts, carry, stacks = scan.split(operands)

        def body(carry: list, slices: list) -> list:
            here = [jax.device_put(value, DEVICE) if at in self.inputs else value for at, value in enumerate(slices)]
            made = scan.split_results(eval_local(scan.closed, [*consts, *carry, *here]))
            kept = [jax.device_put(value, HOST) if at in self.outputs else value for at, value in enumerate(made.ys)]
            return [*made.carry, *kept]

        return rescan(eqn, body, carry, stacks)
