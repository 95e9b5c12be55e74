"""What is at hand is neither read from a stack nor computed again.

Before, as the last iteration of one pipelined loop and the first of the next one run apart::

    y = f(x); s = dynamic_update_slice(s, x, 31); ...; x' = slice(s, 31); y' = f(x')

After::

    y = f(x); s = dynamic_update_slice(s, x, 31); ...; y' = y

So the last checkpointed layer is not recomputed right after it was computed.

Guarantees: values are bitwise the same; what a barrier keeps apart stays apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import is_drop_var
from jax_deepcompile.analysis.dataflow import alike, literal_bits
from jax_deepcompile.analysis.equal_work import is_repeatable, work_key
from jax_deepcompile.ir.memory import is_fetch, is_offload
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import Walk, renamed, unguarded
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.transforms.decision import Decision


@dataclass(frozen=True)
class ComputeOnce(Decision, kind="compute_once", says="what is at hand is not computed or read again"):
    """What is at hand is neither read from a stack nor computed again."""

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[ComputeOnce]) -> Program:
        return program.replace(jaxpr=_merged(program.jaxpr))


def _merged(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    walk = Walk(closed, regions=_merged)
    guarded = unguarded(walk.jaxpr)
    makers = {var: eqn for eqn in walk.jaxpr.eqns for var in eqn.outvars}
    made: dict = {}
    for eqn in walk:
        same = _fetched_back(eqn, makers) if is_fetch(eqn) else _read_back(eqn, makers, guarded)
        if same is not None:
            walk.names[eqn.outvars[0]] = renamed(same, walk.names)
            continue
        if eqn.primitive.name == "optimization_barrier" or not is_repeatable(eqn):
            walk.eqns.append(eqn)
            continue
        first = made.setdefault((work_key(eqn), tuple(literal_bits(atom) or atom for atom in eqn.invars)), eqn)
        if first is eqn or any(map(is_drop_var, first.outvars)):
            walk.eqns.append(eqn)
        else:
            walk.names.update(zip(eqn.outvars, first.outvars, strict=True))
    return walk.result()


def _fetched_back(fetch: Any, makers: dict) -> Any:
    """The value that ``fetch`` copies back from the host, to which it was just copied; else None."""
    copied = makers.get(fetch.invars[0])
    return copied.invars[0] if copied is not None and is_offload(copied) else None


def _read_back(eqn: Any, makers: dict, guarded: dict) -> Any:
    """The value that ``eqn`` takes out of a row of one, cut out of a stack in which it was stored so; else None."""
    cut = makers.get(eqn.invars[0]) if eqn.primitive.name == "squeeze" else None
    if cut is None or cut.primitive.name != "slice" or any(stride != 1 for stride in cut.params["strides"] or ()):
        return None
    row = _stored(cut, makers, guarded)
    laid = None if row is None else makers.get(row)
    if row is None or laid is None or laid.primitive.name != "broadcast_in_dim" or not variables(laid.invars):
        return None
    value, result = laid.invars[0], eqn.outvars[0]
    dims = tuple(dim for dim in range(row.aval.ndim) if dim not in eqn.params["dimensions"])
    return value if alike(value, result) and tuple(laid.params["broadcast_dimensions"]) == dims else None


def _stored(cut: Any, makers: dict, guarded: dict) -> Any:
    """What was stored just where ``cut`` reads; None if that is not known."""
    start, read = tuple(cut.params["start_indices"]), cut.outvars[0]
    stack = renamed(cut.invars[0], guarded)
    while (store := makers.get(stack)) is not None and store.primitive.name == "dynamic_update_slice":
        before, update, *indices = store.invars
        if variables(indices):
            return None
        place = tuple(
            min(max(int(index.val), 0), size - stored)
            for index, size, stored in zip(indices, before.aval.shape, update.aval.shape, strict=True)
        )
        if place == start and alike(update, read):
            return update
        if not _apart(place, update.aval.shape, start, read.aval.shape):
            return None
        stack = renamed(before, guarded)
    return None


def _apart(place: tuple, stored: tuple, start: tuple, read: tuple) -> bool:
    """Whether what is stored and what is read have no element in common."""
    return any(
        one + size <= other or other + length <= one
        for one, size, other, length in zip(place, stored, start, read, strict=True)
    )
