"""Where a step's state and batch are: a line for each leaf, named as plans name it, with where it is gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.gathered import gathered_in
from jax_deepcompile.analysis.names import parameter_names
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.program import Program


def leaves(planned: Program, divided: Program) -> Iterator[dict[str, Any]]:
    """Each input of ``planned``, which was made of ``divided``."""
    where = gathered_in(planned, divided)
    atoms = open_jaxpr(planned.jaxpr).invars
    names = parameter_names(planned)
    for index, (port, name, atom) in enumerate(zip(planned.inputs, names, atoms, strict=True)):
        yield {
            "name": name,
            "role": str(port.role),
            "type": f"{port.dtype}[{','.join(map(str, port.shape))}]",
            "placement": "" if port.placement is None else port.placement.describe(planned.mesh),
            "bytes": size_bytes(atom),
            "memory": port.memory_kind,
            "gathered": where.get(index, []),
        }
