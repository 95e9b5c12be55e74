"""Where a step's state and batch are: a line for each leaf, named as plans name it, with where it is gathered."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathers import find_gathers, outermost
from jax_deepcompile.analysis.loops import loops_in
from jax_deepcompile.analysis.names import gather_names, parameter_names
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program

WITHOUT_A_LOOP = "outside of loops"


def leaves(planned: Program, divided: Program) -> Iterator[dict[str, Any]]:
    """Each input of ``planned``, with what gathers it in ``divided``, the same before any change."""
    where = gathered(divided)
    atoms = open_jaxpr(planned.jaxpr).invars
    for port, name, atom in zip(planned.inputs, parameter_names(planned), atoms, strict=True):
        yield {
            "name": name,
            "role": str(port.role),
            "type": f"{port.dtype}[{','.join(map(str, port.shape))}]",
            "placement": "" if port.placement is None else port.placement.describe(planned.mesh),
            "bytes": math.prod(atom.aval.shape) * atom.aval.dtype.itemsize,
            "memory": port.memory_kind,
            "gathered": where.get(name, []),
        }


def gathered(program: Program) -> dict[str, list[str]]:
    """For each name of a parameter the loops that gather it, or the phases in which it is outside of them."""
    where: defaultdict[str, list[str]] = defaultdict(list)
    bodies = [((), open_jaxpr(program.jaxpr))]
    bodies += [(path, Scan(eqn).body) for path, eqn in loops_in(program.jaxpr) if path in program.loop_names]
    for path, body in bodies:
        for each in gather_names(program, path, outermost(find_gathers(body, body.invars))):
            name, _, phase = each.partition(" @")
            around = program.loop_names.get(path, f"{WITHOUT_A_LOOP}{' @' * bool(phase)}{phase}")
            found = where[name.partition(" #")[0]]
            found += [around] * (around not in found)
    return dict(where)
