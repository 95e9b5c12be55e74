"""Matrix decompositions, solves and Fourier transforms: batches of matrices split freely, matrices stay whole."""

from collections.abc import Sequence

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Dims, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

DECOMPOSITIONS = """
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd tridiagonal
"""


@rule(*DECOMPOSITIONS.split(), "lu_pivots_to_permutation", "fft")
def decomposition(eqn: Equation) -> OpRule:
    """``[batch..., m, n], ... -> [batch..., ...]...``; pivots are vectors, and ``fft`` says what it transforms."""
    core_ranks = {"lu_pivots_to_permutation": 1, "fft": len(eqn.params.get("fft_lengths", ()))}
    builder, batch = _batched(eqn, core_ranks.get(eqn.primitive.name, 2))
    operands, results = ([_behind(builder, batch, var) for var in each] for each in (eqn.invars, eqn.outvars))
    return builder.build(operands, results, linear=[(0,)] if eqn.primitive.name == "fft" else ())


_SOLVES = {"triangular_solve": (2, "left_side"), "ormqr": (2, "left"), "tridiagonal_solve": (1, "")}
"""Dimensions of the first operand, and the parameter that says whether it stands on the left; else it does."""


@rule(*_SOLVES)
def solve(eqn: Equation) -> OpRule:
    """``system[batch..., ...]..., b[batch..., m, n] -> x[batch..., m, n]``, as ``a x = b`` or its mirror ``x a = b``.

    The last operand is transformed linearly, its columns, or in the mirror its rows, independently.
    """
    core_rank, is_left = _SOLVES[eqn.primitive.name]
    free_dim = -1 if eqn.params.get(is_left, True) else -2
    builder, batch = _batched(eqn, core_rank)
    *system, b = eqn.invars
    dims = list(_behind(builder, batch, b))
    dims[free_dim] = builder.map(b.aval.shape[free_dim])
    return builder.build([*(_behind(builder, batch, var) for var in system), dims], [dims], linear=[(len(system),)])


@rule("symmetric_product")
def symmetric_product(eqn: Equation) -> OpRule:
    """``a[batch..., n, k], c[batch..., n, n] -> alpha a aᵀ + beta c [batch..., n, n]``."""
    builder, batch = _batched(eqn, core_rank=2)
    a, c = eqn.invars
    rows = builder.whole(a.aval.shape[-2])
    square = (*batch, rows, builder.whole(c.aval.shape[-1]))
    return builder.build([(*batch, rows, builder.sum(a.aval.shape[-1])), square], [square], addends=(1,))


def _batched(eqn: Equation, core_rank: int) -> tuple[RuleBuilder, Dims]:
    """A builder with the batch dimensions that all lead with, of which the first operand has ``core_rank`` behind."""
    builder = RuleBuilder()
    shape = eqn.invars[0].aval.shape
    return builder, builder.dims(shape[: len(shape) - core_rank])


def _behind(builder: RuleBuilder, batch: Dims, var) -> Sequence[tuple[int, ...]]:
    return (*batch, *builder.whole_dims(var.aval.shape[len(batch) :]))
