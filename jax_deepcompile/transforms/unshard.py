"""Parameters that stay gathered: from the forward to the backward pass, and over all microbatches.

Before, in a loop over microbatches::

    scan(batch): W = all_gather(w); ... V = all_gather(barrier(w)); ...

After, with ``w`` kept from forward to backward::

    scan(batch): W = all_gather(w); ... W ...

and with ``w`` kept over the microbatches too::

    W = all_gather(w); scan(batch): ... W ... W ...

Guarantees: values are bitwise the same; nothing is gathered more often; what is kept lives from its first to its last
use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, eval_local, new_jaxpr, open_jaxpr
from jax_deepcompile.analysis.dataflow import free_variables, slim_barriers, with_names
from jax_deepcompile.analysis.gathers import Gather, find_gathers, hoistable_gathers, slice_of
from jax_deepcompile.analysis.loops import constants_of, find_loops
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import replace_equations, rescan, split_operands
from jax_deepcompile.ir.rewrite import with_renamed_operands


def regathers(jaxpr: Any, sources: Sequence) -> tuple[tuple[Gather, Gather], ...]:
    """Pairs (first, again) of gathers of the same value in straight-line code."""
    first: dict = {}
    pairs = []
    for gather in find_gathers(jaxpr, sources):
        if gather.key in first:
            pairs.append((first[gather.key], gather))
        else:
            first[gather.key] = gather
    return tuple(pairs)


def keep_until_backward(jaxpr: Any, sources: Sequence, again: Collection[int]) -> jex.Jaxpr:
    """``jaxpr`` with the later gathers at the positions ``again`` replaced by what the first one made."""
    flat = open_jaxpr(jaxpr)
    known = {later.result: first.result for first, later in regathers(flat, sources) if later.position in again}
    return with_names(flat, known)


def keep_over_microbatches(program: Program, mesh: AnyMesh, kept: dict[str, Collection[int]]) -> Program:
    """``program`` with gathers done once, before the loop that repeated them.

    Args:
      program: in the local view.
      mesh: its mesh.
      kept: for a loop's name the positions, among ``hoistable_gathers`` of it, of those to do once.
    """
    chosen = {
        id(loop.eqn): kept[loop.name]
        for loop in find_loops(program.jaxpr)
        if set(kept.get(loop.name, ())).intersection(range(len(hoistable_gathers(loop.eqn))))
    }
    if not chosen:
        return program
    return replace_equations(
        program, mesh, {key: lambda eqn, operands: _hoist(eqn, operands, chosen[id(eqn)]) for key in chosen}
    )


def _hoist(eqn, operands: list, kept: Collection[int]) -> list:
    body = Scan(eqn).body
    num_consts = Scan(eqn).num_consts
    gathers = [gather for index, gather in enumerate(hoistable_gathers(eqn)) if index in kept]
    given = constants_of(eqn) | dict(zip(body.invars[:num_consts], operands[:num_consts], strict=True))
    first = {gather.key: gather.result for gather in reversed(gathers)}
    results = list(first.values())
    ahead = slice_of(body, results)
    inputs = free_variables(ahead, results)
    early = new_jaxpr(inputs, results, ahead)
    values = eval_local(early, [given[var] for var in inputs])
    known = {gather.result: first[gather.key] for gather in gathers}
    rest = [with_renamed_operands(other, known) for other in body.eqns if not set(other.outvars) & set(known)]
    rest = slim_barriers(rest, body.outvars)
    inner = new_jaxpr([*body.constvars, *results, *body.invars], body.outvars, rest)
    consts = [*closed_consts(Scan(eqn).closed), *values, *operands[:num_consts]]
    _, carry, stacks = split_operands(eqn, operands)
    return rescan(eqn, lambda carry, slices: eval_local(inner, [*consts, *carry, *slices]), carry, stacks)
