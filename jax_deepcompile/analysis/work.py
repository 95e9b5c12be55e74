"""What the equations of a local program are to XLA: collectives, matrix products, and what it fuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_deepcompile._jax_compat import is_drop_var, open_jaxpr
from jax_deepcompile.analysis.dataflow import variables
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import ANCHORS, ATTENTION, COLLECTIVES, PRODUCTS
from jax_deepcompile.ir.ragged import RaggedProduct
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
class Product:
    """Matrix products of one shape: ``batch`` times an (m, k) by a (k, n) matrix.

    Attributes:
      dtype: type of the factors' elements, as XLA calls it; ``f32-highest`` for full float32.
      repeats: how often what is written is computed: the rows of a ragged product meet one group each, but are filled
        up to whole tiles, or meet all groups.
    """

    batch: float
    m: float
    n: float
    k: float
    dtype: str
    repeats: float = 1.0

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def written_flops(self) -> float:
        """Those that the user wrote."""
        return self.flops / self.repeats


@dataclass(frozen=True)
class Attention:
    """Fused attention.

    Attributes:
      heads: of all sequences together.
      queries, keys: of a sequence.
      head_size: elements of a query.
      seen: the share of pairs of a query and a key that are computed; a mask that the kernel knows hides the others.
      is_gradient: five products instead of two; the scores are computed again.
      dtype: as of a ``Product``.
    """

    heads: float
    queries: int
    keys: int
    head_size: int
    seen: float
    is_gradient: bool
    dtype: str

    @classmethod
    def of(
        cls,
        scores: Sequence[int],
        head_size: int,
        mask_type: str,
        window: int | None,
        is_gradient: bool,
        dtype: str,
    ) -> Attention:
        """cuDNN's fused attention, which leaves out what a mask of its own hides.

        Args:
          scores: sequences, heads, queries and keys.
          head_size: elements of a query.
          mask_type: cuDNN's name of the mask.
          window: keys that a query attends to at most, the last ones; all if there is none.
          is_gradient: of the backward pass.
          dtype: of the queries.
        """
        sequences, heads, queries, keys = scores
        share = min(window or keys, keys) / keys
        seen = share * (1 - share / 2) if window or "CAUSAL" in mask_type else 1.0
        return cls(sequences * heads, queries, keys, head_size, seen, is_gradient, dtype)

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        products = 5 if self.is_gradient else 2
        return 2.0 * products * self.heads * self.queries * self.keys * self.head_size * self.seen

    @property
    def written_flops(self) -> float:
        """Those that the user wrote: of a gradient's five products one is the scores', again."""
        return self.flops * (0.8 if self.is_gradient else 1.0)


def work_of(eqn: Any) -> Product | Attention:
    """What one of ``PRODUCTS`` computes."""
    name, dtype = eqn.primitive.name, _factor(eqn)
    left, right = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    outputs = math.prod(eqn.outvars[0].aval.shape)
    if name in ATTENTION:
        return _attention(eqn, dtype)
    if name == "dot_general":
        (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
        batch, k = math.prod(left[dim] for dim in batched), math.prod(left[dim] for dim in contracted)
        m = math.prod(left) / max(batch * k, 1)
        return Product(batch, m, outputs / max(batch * m, 1), k, dtype)
    if name == "conv_general_dilated":
        channels = max(right[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
        return Product(1, outputs / channels, channels, math.prod(right) / channels, dtype)
    return _ragged(eqn, dtype)


def _ragged(eqn: Any, dtype: str) -> Product:
    """Of ``ragged_dot_general``, whose ragged dimension is one of the rows, contracted, or of a batch."""
    tiled = RaggedProduct.of(eqn)
    if tiled is not None and tiled.pays_in_tiles:
        m, k = (tiled.depth, tiled.tile_rows) if tiled.sums_rows else (tiled.tile_rows, tiled.depth)
        return Product(tiled.tiles, m, tiled.columns, k, dtype, tiled.tiles * tiled.tile_rows / tiled.rows)
    numbers, (left, right, sizes) = eqn.params["ragged_dot_dimension_numbers"], (each.aval.shape for each in eqn.invars)
    (contracted, _), (batched, _) = numbers.dot_dimension_numbers
    batch, k = math.prod(left[dim] for dim in batched), math.prod(left[dim] for dim in contracted)
    groups = 1 if set(numbers.lhs_ragged_dimensions) <= set(batched) else sizes[-1]
    m = math.prod(left) / max(batch * k, 1)
    n = math.prod(right) / max(batch * k, 1) / math.prod(right[dim] for dim in numbers.rhs_group_dimensions)
    return Product(batch * groups, m, n, k, dtype, groups)


def vector_flops(eqn: Any) -> float:
    """Arithmetic of random bits, which takes longer than memory does; 0 for all else, where it does not matter."""
    return _THREEFRY_FLOPS * math.prod(eqn.outvars[0].aval.shape) if eqn.primitive.name == "threefry2x32" else 0.0


_THREEFRY_FLOPS = 300
"""Of each element: rounds of additions, rotations and logic, as ``costs.work`` counts those of what XLA compiles."""


def alone_bytes(eqn: Any) -> float:
    """What an equation alone reads and writes in device memory."""
    return float(sum(size_bytes(atom) for atom in (*variables(eqn.invars), *eqn.outvars)))


def _attention(eqn: Any, dtype: str) -> Attention:
    """Of ``query[b, t, h, d], key[b, s, h, d], ...``, or with heads before positions."""
    heads_first = eqn.params["layout"] == 1
    (batch, *query, head_size), key = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    queries, heads = reversed(query) if heads_first else query
    scores = batch, heads, queries, key[2 if heads_first else 1]
    name, window = eqn.primitive.name, eqn.params["sliding_window_length"]
    return Attention.of(scores, head_size, eqn.params["mask_type"].name, window, "_bwd" in name, dtype)


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
