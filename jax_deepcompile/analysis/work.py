"""What the equations of a local program are to XLA: collectives, matrix products, and what it fuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import is_drop_var, open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.ir.primitives import ANCHORS, ATTENTION, COLLECTIVES, PRODUCTS
from jax_deepcompile.ir.traversal import bodies

_XLA_NAMES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int8": "s8",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}
"""What XLA calls the types of elements that it has fast matrix products of."""

_UNFUSED = frozenset({*COLLECTIVES, *PRODUCTS, "device_put", "optimization_barrier"})


def is_anchor(eqn: Any) -> bool:
    """Whether ``eqn`` makes, with work, an array that others can wait for."""
    if eqn.primitive.name not in ANCHORS or not eqn.outvars:
        return False
    return not is_drop_var(eqn.outvars[0]) and bool(eqn.outvars[0].aval.shape)


@dataclass(frozen=True)
class Work:
    """What one matrix product asks of the machine.

    Attributes:
      flops: multiplications and additions.
      dtype: type of the factors' elements, as XLA calls it; ``f32-highest`` for full float32.
      size_bytes: read and written in device memory.
    """

    flops: float
    dtype: str
    size_bytes: float


def work_of(eqn: Any) -> Work:
    """The work of one of ``PRODUCTS``."""
    moved = float(sum(size_bytes(atom) for atom in (*variables(eqn.invars), *eqn.outvars)))
    if eqn.primitive.name in ATTENTION:
        return Work(_attention(eqn), _factor(eqn), moved)
    return Work(2.0 * _depth(eqn) * math.prod(eqn.outvars[0].aval.shape), _factor(eqn), moved)


def attention_flops(
    scores: Sequence[int], head_size: int, mask_type: str, window: int | None, is_gradient: bool
) -> float:
    """Multiplications and additions of cuDNN's fused attention, which leaves out what a mask of its own hides.

    Args:
      scores: sequences, heads, queries and keys.
      head_size: elements of a query.
      mask_type: cuDNN's name of the mask.
      window: keys that a query attends to at most, the last ones; all if there is none.
      is_gradient: five products instead of two; the scores are computed again.
    """
    sequences, heads, queries, keys = scores
    share = min(window or keys, keys) / keys
    seen = share * (1 - share / 2) if window or "CAUSAL" in mask_type else 1.0
    return 2.0 * (5 if is_gradient else 2) * sequences * heads * queries * keys * head_size * seen


def _attention(eqn: Any) -> float:
    """FLOPs of ``query[b, t, h, d], key[b, s, h, d], ...``, or with heads before positions."""
    heads_first = eqn.params["layout"] == 1
    (batch, *query, head_size), key = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    queries, heads = reversed(query) if heads_first else query
    scores = batch, heads, queries, key[2 if heads_first else 1]
    name, window = eqn.primitive.name, eqn.params["sliding_window_length"]
    return attention_flops(scores, head_size, eqn.params["mask_type"].name, window, "_bwd" in name)


def _depth(eqn: Any) -> float:
    """Products that are summed for one element of the result."""
    left, right = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return math.prod(left[dim] for dim in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        return math.prod(right) / max(right[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
    return right[0] * left[-1]  # XLA:GPU multiplies every row of a ragged product with every group's matrix


def _factor(eqn: Any) -> str:
    dtype = str(eqn.invars[0].aval.dtype)
    name = _XLA_NAMES.get(dtype, dtype)
    highest = name == "f32" and "HIGHEST" in str(eqn.params.get("precision"))
    return "f32-highest" if highest else name


def fused_away(jaxpr: Any) -> set:
    """Variables of a jaxpr that XLA never writes to memory: read once, by work that is no matrix product."""
    flat = open_jaxpr(jaxpr)
    uses: dict = {}
    for eqn in flat.eqns:
        for atom in set(variables(eqn.invars)):
            uses.setdefault(atom, []).append(fuses(eqn))
    kept = set(variables(flat.outvars))
    made = {var for eqn in flat.eqns if fuses(eqn) for var in eqn.outvars}
    return {var for var in made if var not in kept and uses.get(var) == [True]}


def fuses(eqn: Any) -> bool:
    """Whether XLA may compute ``eqn`` in one kernel with what it reads or what reads it."""
    return eqn.primitive.name not in _UNFUSED and not bodies(eqn)
