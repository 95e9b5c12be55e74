"""What a forward loop stacks for the backward loop over the same layers, and nobody else reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.loops import Loop
from jax_deepcompile.analysis.names import numbered, value_names
from jax_deepcompile.ir.memory import is_on_host, size_bytes
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.rewrite import renamed, unguarded
from jax_deepcompile.ir.traversal import variables


@dataclass(frozen=True)
class Residual:
    """One stack.

    Attributes:
      name: what plans call it: by the scope that computes a layer's slice of it, or ``layers input`` where that is what
        the layer is given.
      output: its position among the stacked outputs of the forward loop.
      inputs: its positions among the stacked inputs of the backward loop.
      size_bytes: of one layer's slice.
      is_given: whether it is what the layer is given, and not computed by it.
    """

    name: str
    output: int
    inputs: tuple[int, ...]
    size_bytes: int
    is_given: bool = False


def residuals(around: Any, forward: Loop, backward: Loop) -> tuple[Residual, ...]:
    """The stacks in the device's memory that ``forward`` makes and only ``backward`` reads, a layer at a time.

    Args:
      around: the jaxpr that both loops are equations of.
    """
    ahead, again = Scan(forward.eqn), Scan(backward.eqn)
    if ahead.length != again.length:
        return ()
    flat = open_jaxpr(around)
    sources = unguarded(flat)
    read = [renamed(atom, sources) for atom in again.operands.xs]
    elsewhere = set(variables(renamed(atom, sources) for atom in flat.outvars))
    for eqn in flat.eqns:
        if eqn.primitive.name != "optimization_barrier":
            atoms = [*again.operands.consts, *again.operands.carry] if eqn is backward.eqn else eqn.invars
            elsewhere.update(variables(renamed(atom, sources) for atom in atoms))
    names, given = _names(forward, ahead.outputs.ys), set(forward.body.invars)
    found = []
    for output, (stack, atom, name) in enumerate(zip(ahead.results.ys, ahead.outputs.ys, names, strict=True)):
        inputs = tuple(place for place, source in enumerate(read) if source is stack)
        if inputs and stack not in elsewhere and isinstance(atom, jex.Var) and _can_move(atom):
            found.append(Residual(name, output, inputs, size_bytes(atom), atom in given))
    return tuple(found)


def _can_move(atom: Any) -> bool:
    return isinstance(atom.aval.dtype, np.dtype) and bool(atom.aval.shape) and not is_on_host(atom)


def _names(forward: Loop, outputs: Sequence) -> list[str]:
    known = value_names(forward.body)
    given = f"{forward.name.partition(' @')[0]} input"
    return numbered([known.get(atom, given) if isinstance(atom, jex.Var) else given for atom in outputs])
