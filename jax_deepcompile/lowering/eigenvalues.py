"""Eigenvalues of several matrices, one after the other: threads that share them may wait for one another for ever."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import hangs_on_eigenvalues, line_of
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.rewrite import Walk, abstract, inlined


def with_eigenvalues_in_turn(closed: jex.ClosedJaxpr, mesh: AnyMesh) -> jex.ClosedJaxpr:
    """``closed``, as it can be run on ``mesh``.

    2026-11, jaxlib 0.10.2: XLA:CPU shares the matrices of a batch among its threads, and with collectives beside them
    eight devices of a process do not come to an end. Before and after::

        v, w = eigh x:f32[4,8,8]
        v, w = scan[length=4; eigh x_i:f32[8,8]] x
    """
    devices = () if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices.flat
    on_cpu = any(device.platform == "cpu" for device in devices)
    return _in_turn(closed) if on_cpu and hangs_on_eigenvalues() else closed


def _in_turn(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    walk = Walk(closed, _in_turn)
    for eqn in walk:
        shape = eqn.invars[0].aval.shape if eqn.primitive.name == "eigh" else ()
        walk.eqns += _looped(eqn, shape) if math.prod(shape[:-2]) > 1 else [eqn]
    return walk.result()


def _looped(eqn: Any, shape: tuple[int, ...]) -> list:
    def each(matrices: jax.Array) -> list[jax.Array]:
        flat = lax.reshape(matrices, (math.prod(shape[:-2]), *shape[-2:]))
        made = lax.map(lambda matrix: eqn.primitive.bind(matrix, **eqn.params), flat)
        return [lax.reshape(value, var.aval.shape) for value, var in zip(made, eqn.outvars, strict=True)]

    with line_of(eqn):
        return inlined(jax.make_jaxpr(each)(*map(abstract, eqn.invars)), eqn.invars, eqn.outvars)
