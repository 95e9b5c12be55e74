"""Collectives of a layer loop done for whole stacks of layers, outside of the loop.

Before::

    scan(t): W = all_gather(w[t]); B = all_gather(b[t]); y, p = layer(y, W, B); g[t] = reduce_scatter(p)

After, with the gather of ``b`` and the reduction taken out::

    B = all_gather(b)
    scan(t): W = all_gather(w[t]); y, p[t] = layer(y, W, B[t])
    g = reduce_scatter(p)

What is small then costs one latency for all layers, and joins what is gathered once for many runs of the loop. Stacks
above ``at_once_bytes`` are gathered layer by layer, in a loop of their own: gathered along any dimension but the first
they would be transposed in memory.

Guarantees: values are bitwise the same; whole stacks live from the first loop that reads them to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jax_deepcompile._jax_compat import eval_local, new_jaxpr
from jax_deepcompile.analysis.dataflow import given
from jax_deepcompile.analysis.gathers import slicer
from jax_deepcompile.analysis.leading import scan_along_leading_dimension
from jax_deepcompile.analysis.loops import Loop
from jax_deepcompile.analysis.names import gather_names, reduction_names
from jax_deepcompile.analysis.stacks import sliced_gathers, stacked_reductions
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, rerun
from jax_deepcompile.transforms.decision import Decision, listed, loop_named, positions, replace_loops


@dataclass(frozen=True)
class StackCollectives(Decision, kind="stack_collectives", about=("loop",)):
    """What one loop leaves to collectives of whole stacks.

    Attributes:
      gathers: parameters that it gathers slices of.
      reductions: parameters whose gradients it reduces and stacks.
    """

    loop: str
    gathers: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ()

    def describe(self) -> str:
        parts = (("gathers", self.gathers), ("reduces", self.reductions))
        said = " and ".join(f"{verb} {listed(names, self.loop)}" for verb, names in parts if names)
        return f"{self.loop}: {said} for all layers at once, outside of the loop"

    @staticmethod
    def apply(
        program: Program, mesh: AnyMesh, decisions: Sequence[StackCollectives], at_once_bytes: int = 64 << 20
    ) -> Program:
        """Up to ``at_once_bytes`` a whole stack is gathered by one collective."""
        chosen = {each.loop: _chosen(program, each) for each in decisions}

        def outside(loop: Loop) -> Compute:
            return lambda eqn, operands: _outside(eqn, operands, *chosen[loop.name], at_once_bytes)

        return replace_loops(program, mesh, {loop: outside for loop, places in chosen.items() if any(places)})


def slice_names(program: Program, loop: Loop) -> list[str]:
    """What the gathers of slices in ``loop`` are called, in the order of ``sliced_gathers``."""
    return gather_names(program, loop.path, [group[0] for group in sliced_gathers(loop.eqn)])


def stacked_names(program: Program, loop: Loop) -> list[str]:
    """What the reductions that make stacked outputs of ``loop`` are called, in the order of ``stacked_reductions``."""
    return reduction_names(program, loop, [loop.scan.num_carry + each.output for each in stacked_reductions(loop.eqn)])


def _chosen(program: Program, choice: StackCollectives) -> tuple[list[int], list[int]]:
    """Positions of the gathers and of the reductions that ``choice`` names."""
    loop = loop_named(program, choice.loop, "takes collectives out of")
    gathers = positions(choice.gathers, slice_names(program, loop), f"takes out of {choice.loop!r} the gather of")
    reduces = f"takes out of {choice.loop!r} the reduction of"
    return gathers, positions(choice.reductions, stacked_names(program, loop), reduces)


def _outside(eqn, operands: list, wanted: Sequence[int], reduced: Sequence[int], at_once_bytes: int) -> list:
    eqn = scan_along_leading_dimension(eqn)
    body, length, num_carry = Scan(eqn).body, Scan(eqn).length, Scan(eqn).num_carry
    stacks = dict(zip(Scan(eqn).inputs.xs, Scan(eqn).split(operands).xs, strict=True))
    groups = [group for index, group in enumerate(sliced_gathers(eqn)) if index in wanted]
    slice_for, gathered = slicer(body), []
    for gather, *_ in groups:
        part = new_jaxpr(gather.sources, [gather.result], slice_for([gather.result]))
        at_once = length * gather.size_bytes <= at_once_bytes
        gathered.append(_each_layer(part, stacks[gather.sources[0]], at_once))

    reductions = [each for index, each in enumerate(stacked_reductions(eqn)) if index in reduced]
    outvars = list(body.outvars)
    for each in reductions:
        outvars[num_carry + each.output] = each.operand
    rest = given(body.replace(outvars=outvars), [[gather.result for gather in group] for group in groups])
    made = rerun(eqn, rest, operands, gathered)
    for each in reductions:
        part = new_jaxpr([each.operand], [each.eqns[-1].outvars[0]], each.eqns)
        made[num_carry + each.output] = _each_layer(part, made[num_carry + each.output], at_once=True)
    return made


def _each_layer(part: Any, stack: jax.Array, at_once: bool) -> jax.Array:
    def one(layer):
        return eval_local(part, [layer])[0]

    return jax.vmap(one)(stack) if at_once else lax.map(one, stack)
