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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jax_deepcompile._jax_compat import closed_consts, eval_local, new_jaxpr, scan_counts
from jax_deepcompile.analysis.dataflow import renamed, slim_barriers
from jax_deepcompile.analysis.gathers import Gather, slice_of
from jax_deepcompile.analysis.leading import scan_along_leading_dimension
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.stacks import sliced_gathers, stacked_reductions
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import replace_equations, rescan, split_operands
from jax_deepcompile.ir.rewrite import with_renamed_operands


@dataclass(frozen=True)
class StackCollectives:
    """What one loop leaves to collectives of whole stacks.

    Attributes:
      loop: the loop's name.
      gathers: positions among its gathers of slices.
      reductions: positions among the reductions that make its stacked outputs.
    """

    loop: str
    gathers: tuple[int, ...] = ()
    reductions: tuple[int, ...] = ()


def stack_collectives(
    program: Program, mesh: AnyMesh, choices: Sequence[StackCollectives], at_once_bytes: int = 64 << 20
) -> Program:
    """``program`` with the chosen collectives taken out of their loops; the same object if none is.

    Args:
      program: in the local view.
      mesh: its mesh.
      choices: at most one for each loop.
      at_once_bytes: up to this size a whole stack is gathered by one collective.
    """
    wanted = {choice.loop: choice for choice in choices if choice.gathers or choice.reductions}
    for depth in sorted({name.count("/") for name in wanted}, reverse=True):
        loops = [loop for loop in find_loops(program.jaxpr) if loop.name in wanted and loop.name.count("/") == depth]
        rewritten: Mapping = {
            id(loop.eqn): lambda eqn, operands, choice=wanted[loop.name]: _outside(eqn, operands, choice, at_once_bytes)
            for loop in loops
            if _chosen(loop.eqn, wanted[loop.name])
        }
        program = replace_equations(program, mesh, rewritten) if rewritten else program
    return program


def _chosen(eqn, choice: StackCollectives) -> bool:
    """Whether the loop has any of the collectives chosen."""
    gathers, reductions = range(len(sliced_gathers(eqn))), range(len(stacked_reductions(eqn)))
    return any(index in gathers for index in choice.gathers) or any(index in reductions for index in choice.reductions)


def _outside(eqn, operands: list, choice: StackCollectives, at_once_bytes: int) -> list:
    eqn = scan_along_leading_dimension(eqn)
    body, length = Scan(eqn).body, Scan(eqn).length
    num_consts, num_carry = scan_counts(eqn)
    consts, carry, stacks = split_operands(eqn, operands)
    slices = body.invars[num_consts + num_carry :]
    groups = [group for index, group in enumerate(sliced_gathers(eqn)) if index in choice.gathers]
    gathered = []
    for gather, *_ in groups:
        part = new_jaxpr([gather.source], [gather.result], slice_of(body, [gather.result]))
        at_once = length * gather.size_bytes <= at_once_bytes
        gathered.append(_each_layer(part, stacks[slices.index(gather.source)], at_once))

    reductions = [each for index, each in enumerate(stacked_reductions(eqn)) if index in choice.reductions]
    outvars = list(body.outvars)
    for each in reductions:
        outvars[num_carry + each.output] = each.operand
    inner = given_gathers(body, outvars, groups)
    consts = [*closed_consts(Scan(eqn).closed), *consts]

    def step(carry: list, layer: list) -> list:
        return eval_local(inner, [*consts, *carry, *layer])

    made = rescan(eqn, step, carry, [*stacks, *gathered])
    for each in reductions:
        part = new_jaxpr([each.operand], [each.eqns[-1].outvars[0]], each.eqns)
        made[num_carry + each.output] = _each_layer(part, made[num_carry + each.output], at_once=True)
    return made


def given_gathers(body: Any, outvars: Sequence, groups: Sequence[tuple[Gather, ...]]) -> Any:
    """A loop's body that does not gather ``groups``: their values come last among its inputs, its constants first."""
    names = {gather.result: group[0].result for group in groups for gather in group}
    outvars = [renamed(atom, names) for atom in outvars]
    rest = [with_renamed_operands(inner, names) for inner in body.eqns if not set(inner.outvars) & set(names)]
    rest = slim_barriers(rest, outvars)
    given = [group[0].result for group in groups]
    return new_jaxpr([*body.constvars, *body.invars, *given], outvars, rest)


def _each_layer(part: Any, stack: jax.Array, at_once: bool) -> jax.Array:
    def one(layer):
        return eval_local(part, [layer])[0]

    return jax.vmap(one)(stack) if at_once else lax.map(one, stack)
