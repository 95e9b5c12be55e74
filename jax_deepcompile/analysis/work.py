"""How much arithmetic and memory traffic an equation is, from its shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.ir.traversal import nested_jaxprs

COLLECTIVES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""What XLA calls the collectives of a local program."""

_FREE = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "convert_element_type",
        "iota",
        "optimization_barrier",
        "stop_gradient",
        "copy_p",
        "axis_index",
        "slice",
    }
)
"""What XLA computes where it is read."""


@dataclass(frozen=True)
class Work:
    """What one equation asks of the machine.

    Attributes:
      matmul_flops: multiplications and additions in matrix products.
      dtype: type of the products' factors.
      size_bytes: read and written in device memory.
    """

    matmul_flops: float
    dtype: str
    size_bytes: float


def work_of(eqn: Any) -> Work:
    """The work of an equation that is no loop, branch or collective."""
    name = eqn.primitive.name
    if name in _FREE:
        return Work(0.0, "float32", 0.0)
    moved = float(sum(size_bytes(atom) for atom in (*variables(eqn.invars), *eqn.outvars)))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
        return Work(2.0 * depth * math.prod(eqn.outvars[0].aval.shape), str(eqn.invars[0].aval.dtype), moved)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        depth = math.prod(kernel) / max(out_features, 1)
        return Work(2.0 * depth * math.prod(eqn.outvars[0].aval.shape), str(eqn.invars[0].aval.dtype), moved)
    if name == "ragged_dot_general":
        groups, depth = eqn.invars[1].aval.shape[0], eqn.invars[0].aval.shape[-1]
        flops = 2.0 * groups * depth * math.prod(eqn.outvars[0].aval.shape)
        return Work(flops, str(eqn.invars[0].aval.dtype), moved)
    if name == "dynamic_update_slice":
        return Work(0.0, "float32", 2.0 * size_bytes(eqn.invars[1]))
    if name in ("dynamic_slice", "gather"):
        return Work(0.0, "float32", 2.0 * size_bytes(eqn.outvars[0]))
    return Work(0.0, "float32", moved)


def fused_away(jaxpr: Any) -> set:
    """Variables of a jaxpr that XLA never writes to memory: read once, by work that is no matrix product."""
    flat = open_jaxpr(jaxpr)
    uses: dict = {}
    for eqn in flat.eqns:
        fuses = not nested_jaxprs(eqn) and eqn.primitive.name not in (*COLLECTIVES, *PRODUCTS)
        for atom in set(variables(eqn.invars)):
            uses.setdefault(atom, []).append(fuses)
    kept = set(variables(flat.outvars))
    made = {
        var
        for eqn in flat.eqns
        if not nested_jaxprs(eqn) and eqn.primitive.name not in (*COLLECTIVES, *PRODUCTS)
        for var in eqn.outvars
        if not isinstance(var, jex.Literal)
    }
    return {var for var in made if var not in kept and uses.get(var) == [True]}


PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""Primitives that run as kernels of their own."""
