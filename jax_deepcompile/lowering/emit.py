"""A local-view program as a function of global arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_deepcompile._jax_compat import eval_local, open_jaxpr
from jax_deepcompile.ir.memory import HOST_KIND
from jax_deepcompile.ir.placement import AnyMesh, around
from jax_deepcompile.ir.program import Port, Program
from jax_deepcompile.lowering.eigenvalues import with_eigenvalues_in_turn
from jax_deepcompile.lowering.ragged_products import with_tiles
from jax_deepcompile.lowering.transposed_products import without_transposes


def emit(program: Program, mesh: AnyMesh) -> Callable[..., list[jax.Array]]:
    """``f(*inputs) -> outputs`` on global arrays, each device running ``program`` on its blocks."""
    jaxpr = with_eigenvalues_in_turn(with_tiles(without_transposes(program.jaxpr)), mesh)
    mapped = jax.shard_map(
        lambda *blocks: eval_local(jaxpr, blocks),
        mesh=mesh,
        in_specs=tuple(port.where.spec(program.mesh) for port in program.inputs),
        out_specs=[port.where.spec(program.mesh) for port in program.outputs],
        axis_names=frozenset(program.mesh.names),
        check_vma=False,
    )

    def run(*inputs):
        with around(mesh):
            return mapped(*inputs)

    return run


def shardings_of(tree: Any, leaves: Sequence[NamedSharding | None]) -> Any:
    """``leaves`` in the user's containers, for ``jax.jit``; None, JAX's to find out, where one holds arrays only."""
    try:
        return jax.tree.unflatten(tree, leaves)
    except Exception:
        return None


def sharding_of(port: Port, program: Program, mesh: AnyMesh) -> NamedSharding:
    """Where the input or output ``port`` lives as a global array."""
    spec = port.where.spec(program.mesh)
    if port.memory_kind != HOST_KIND:
        return NamedSharding(mesh, spec)
    there = NamedSharding(mesh, spec, memory_kind=HOST_KIND)
    # Of devices that are not here JAX knows no memory kinds, and takes an abstract mesh's word for them.
    return there if there.memory_kind == HOST_KIND else NamedSharding(mesh.abstract_mesh, spec, memory_kind=HOST_KIND)


def abstract_outputs(program: Program, shardings: Sequence[NamedSharding]) -> list[jax.ShapeDtypeStruct]:
    """The outputs of ``program`` as global arrays that nothing computes."""
    outputs = zip(program.outputs, open_jaxpr(program.jaxpr).outvars, shardings, strict=True)
    return [jax.ShapeDtypeStruct(port.shape, var.aval.dtype, sharding=sharding) for port, var, sharding in outputs]


def lower(program: Program, mesh: AnyMesh, platform: str) -> jax.stages.Lowered:
    """``program`` in StableHLO, its state's buffers donated.

    Where no mesh axis is automatic, it is to the letter what the step is when it is called. So JAX's persistent
    compilation cache has what was compiled for planning, unless several processes share the run.

    Args:
      program: in the local view.
      mesh: its mesh; devices that are not attached will do.
      platform: ``cpu`` or ``cuda``.
    """
    shapes = [
        jax.ShapeDtypeStruct(port.shape, var.aval.dtype, sharding=sharding_of(port, program, mesh))
        for port, var in zip(program.inputs, open_jaxpr(program.jaxpr).invars, strict=True)
    ]
    flat = emit(program, mesh)

    def step(*inputs):
        return jax.tree.unflatten(program.out_tree, flat(*inputs))

    step.__name__ = step.__qualname__ = program.name.rsplit(".", 1)[-1]
    jitted = jax.jit(
        step,
        out_shardings=shardings_of(program.out_tree, [sharding_of(port, program, mesh) for port in program.outputs]),
        donate_argnums=tuple(index for index, _ in program.state_outputs),
        keep_unused=bool(program.unread_state),  # which has memory, too
    )
    return jitted.trace(*shapes).lower(lowering_platforms=(platform,))
