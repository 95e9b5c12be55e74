"""Matrix products and attention of special shape: groups of rows, scaled blocks, cuDNN's fused attention."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Dims, Kind, LocalEquation, OpRule, RuleBuilder, replicated_rule
from jax_deepcompile.partition.rules.contraction import product
from jax_deepcompile.partition.rules.registry import rule


@rule("ragged_dot_general")
def ragged_dot(eqn: Equation) -> OpRule:
    """A matrix product one dimension of which is cut into groups, the sizes of which are an operand.

    * ``m`` cut: ``x[batch, m, k], y[group, batch, k, n], sizes[batch, outer m, group] -> [batch, m, n]``;
    * ``k`` cut: ``x[batch, m, k], y[batch, k, n], sizes[batch, outer k, group] -> [group, batch, m, n]``;
    * a batch dimension cut: ``x[batch, m, k], y[batch, k, n], sizes[outer batch, group] -> [batch, m, n]``.

    The sizes may lack all dimensions but the last.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    sizes = eqn.invars[2].aval.shape
    builder = RuleBuilder()
    group = builder.whole(sizes[-1])
    groups = dict.fromkeys(numbers.rhs_group_dimensions, group)
    x, y, result = product(builder, eqn, numbers.dot_dimension_numbers, Kind.SUM, groups)
    outer = [x[dim] for dim in _outer_dims(ragged, len(x), batch, contract)] if len(sizes) > 1 else []

    def emit(local: LocalEquation, x_block: jax.Array, y_block: jax.Array, sizes: jax.Array) -> Sequence[jax.Array]:
        return local.bind(x_block, y_block, _local_group_sizes(local, x[ragged], sizes))

    results = [(group, *result) if ragged in contract else result]
    return builder.build([x, y, [*outer, group]], results, linear=[(0,), (1,)], emit=emit)


def _outer_dims(ragged: int, rank: int, batch: Sequence[int], contract: Sequence[int]) -> list[int]:
    """The dimensions of ``x`` each index of which has group sizes of its own, in the order of the group sizes."""
    free = [dim for dim in range(rank) if dim not in batch and dim not in contract]
    kind = next(dims for dims in (batch, contract, free) if ragged in dims)
    before = list(kind[: list(kind).index(ragged)])
    return before if kind is batch else [*batch, *before]


def _local_group_sizes(local: LocalEquation, ragged: Sequence[int], sizes: jax.Array) -> jax.Array:
    """How much of every group lies in this device's block of the ragged dimension."""
    if not any(local.splits[factor] for factor in ragged):
        return sizes
    start = local.start(ragged)
    ends = jnp.cumsum(sizes, axis=-1, dtype=jnp.promote_types(sizes.dtype, jnp.int32))
    first = jnp.maximum(ends - sizes, start)
    last = jnp.minimum(ends, start + local.dim_size(ragged))
    return jnp.maximum(last - first, 0).astype(sizes.dtype)


@rule("scaled_dot")
def scaled_dot(eqn: Equation) -> OpRule:
    return _scaled_product(eqn, *eqn.params["dimension_numbers"])


@rule("scaled_matmul", "scaled_matmul_wrapper")
def scaled_matmul(eqn: Equation) -> OpRule:
    """``x[batch, m, k], y[batch, n, k], scales of x[batch, m, block], of y[batch, n, block] -> [batch, m, n]``."""
    return _scaled_product(eqn, ((2,), (2,)), ((0,), (0,)))


def _scaled_product(eqn: Equation, contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> OpRule:
    """``x, y, scales of x, scales of y``: as ``dot_general``, but what is contracted stays whole, as blocks do.

    Scales have the dimensions of what they scale; contracted ones count blocks.
    """
    builder = RuleBuilder()
    x, y, result = product(builder, eqn, (contract, batch), Kind.WHOLE)
    scales = [
        [builder.whole(size) if dim in blocks else dims[dim] for dim, size in enumerate(var.aval.shape)]
        for dims, blocks, var in zip((x, y), contract, eqn.invars[2:], strict=True)
    ]
    return builder.build([x, y, *scales], [result])


@rule("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")
def attention(eqn: Equation) -> OpRule:
    """``query, key, value, bias, ... -> output[, statistics]``; see ``_attention``."""
    return _attention(eqn, saved=(), results=("query", "statistics"))


@rule("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper")
def attention_gradient(eqn: Equation) -> OpRule:
    """``query, key, value, bias, ..., statistics, output, gradient -> gradients of the first three or four``."""
    return _attention(eqn, saved=("statistics", "query", "query"), results=("query", "key", "key", "bias"))


rule("platform_index")(replicated_rule)
"""Which of the implementations of ``lax.platform_dependent`` runs: a number, known when it is lowered."""

_HEADS_FIRST = 1
"""The ``layout`` in which heads come before positions."""


def _attention(eqn: Equation, saved: Sequence[str], results: Sequence[str]) -> OpRule:
    """cuDNN attention: sequences, and heads of keys with the heads of queries that share them, split freely.

    Operands are ``query[b, t, hg, d], key[b, s, h, d], value[b, s, h, e], bias[b or 1, hg or 1, t, s]``, the numbers of
    queries and of keys of every sequence, ``[b]``, two of packing and two of paging, then ``saved``. The gradient of a
    bias that sequences or heads share is a partial sum when they are split.

    Args:
      saved: which of ``query`` and ``statistics[b, hg, t]`` each further operand is laid out as.
      results: the same of each result, of which the last may be missing.
    """
    reason = _undivided(eqn)
    if reason:
        return replicated_rule(eqn, reported=reason)
    results = results[: len(eqn.outvars)]
    query, key, _, bias = (var.aval.shape for var in eqn.invars[:4])
    heads_dim = 1 if eqn.params["layout"] == _HEADS_FIRST else 2
    builder = RuleBuilder()

    shared = [dim for dim in (0, 1) if "bias" in results and bias[dim] == 1]
    batch = (builder.factor(query[0], Kind.SUM if 0 in shared else Kind.MAP),)
    heads = (builder.factor(key[heads_dim], Kind.SUM if 1 in shared else Kind.MAP),)
    query_heads = (*heads, builder.factor(query[heads_dim] // key[heads_dim], Kind.WHOLE))
    layouts = {
        "query": {0: batch, heads_dim: query_heads},
        "key": {0: batch, heads_dim: heads},
        "bias": {0: batch, 1: query_heads},
        "lengths": {0: batch},
        "statistics": {0: batch, 1: query_heads},
        "other": {},
    }

    def dims(var, layout: str) -> Dims:
        split = layouts[layout]
        sizes = {dim: math.prod(builder.factors[factor].size for factor in split[dim]) for dim in split}
        shape = enumerate(var.aval.shape)
        return tuple(split[dim] if sizes.get(dim) == size else builder.whole(size) for dim, size in shape)

    operands = ("query", "key", "key", "bias", "lengths", "lengths", *["other"] * 4, *saved)
    return builder.build(
        [dims(var, layout) for var, layout in zip(eqn.invars, operands, strict=True)],
        [dims(var, layout) for var, layout in zip(eqn.outvars, results, strict=True)],
    )


def _undivided(eqn: Equation) -> str:
    """Why a cuDNN attention means something else on a part of its batch; empty if it does not."""
    offsets, pages = eqn.invars[6].aval.shape, eqn.invars[8].aval.shape
    if eqn.params["dropout_rate"] > 0:
        return "cuDNN attention draws its dropout by position in the batch it is given"
    if len(offsets) > 1:
        return "cuDNN attention packs the statistics of packed sequences over the batch it is given"
    if len(pages) > 1:
        return "cuDNN attention looks up pages in the batch it is given"
    if eqn.params["mask_type"].name == "ALIBI":
        return "cuDNN attention biases a head by its number among those it is given"
    if eqn.params.get("score_mod") is not None or eqn.params.get("score_mod_jaxpr") is not None:
        return "the score function of cuDNN attention is the user's, for the batch it is given"
    return ""
