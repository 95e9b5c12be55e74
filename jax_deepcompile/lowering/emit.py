"""A local-view program as a function of global arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import NamedSharding

from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Port, Program


def emit(program: Program, mesh: AnyMesh) -> Callable[..., list[jax.Array]]:
    """``f(*inputs) -> outputs`` on global arrays, each device running ``program`` on its blocks."""
    return jax.shard_map(
        lambda *blocks: eval_local(program.jaxpr, blocks),
        mesh=mesh,
        in_specs=tuple(port.where.spec(program.mesh) for port in program.inputs),
        out_specs=[port.where.spec(program.mesh) for port in program.outputs],
        axis_names=frozenset(program.mesh.names),
        check_vma=False,
    )


def sharding_of(port: Port, program: Program, mesh: AnyMesh) -> NamedSharding:
    """Where the input or output ``port`` lives as a global array."""
    return NamedSharding(mesh, port.where.spec(program.mesh))
