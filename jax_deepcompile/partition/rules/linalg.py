"""Matrix decompositions, solves and Fourier transforms: batches of matrices split freely, matrices stay whole."""

from __future__ import annotations

from collections.abc import Sequence

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.rules.base import Dims, OpRule, RuleBuilder
from jax_deepcompile.partition.rules.registry import rule

DECOMPOSITIONS = """
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd tridiagonal
"""


@rule(*DECOMPOSITIONS.split())
def decomposition(eqn: Equation) -> OpRule:
    """``[batch..., m, n], ... -> [batch..., ...]...``."""
    builder, batch = _batched(eqn, core_rank=2)
    operands = [_behind(builder, batch, var) for var in eqn.invars]
    return builder.build(operands, [_behind(builder, batch, var) for var in eqn.outvars])


@rule("lu_pivots_to_permutation")
def pivots_to_permutation(eqn: Equation) -> OpRule:
    """``pivots[batch..., k] -> permutation[batch..., m]``."""
    builder, batch = _batched(eqn, core_rank=1)
    return builder.build([_behind(builder, batch, eqn.invars[0])], [_behind(builder, batch, eqn.outvars[0])])


@rule("fft")
def fft(eqn: Equation) -> OpRule:
    """``[batch..., transformed...] -> [batch..., transformed...]``."""
    builder, batch = _batched(eqn, core_rank=len(eqn.params["fft_lengths"]))
    operand, result = _behind(builder, batch, eqn.invars[0]), _behind(builder, batch, eqn.outvars[0])
    return builder.build([operand], [result], linear=[(0,)])


@rule("triangular_solve")
def triangular_solve(eqn: Equation) -> OpRule:
    """``a[batch..., m, m], b[batch..., m, n] -> x[batch..., m, n]`` of ``a x = b``, or its mirror ``x a = b``."""
    return _solve(eqn, core_rank=2, free_dim=-1 if eqn.params["left_side"] else -2)


@rule("tridiagonal_solve")
def tridiagonal_solve(eqn: Equation) -> OpRule:
    """``lower[batch..., m], diagonal[batch..., m], upper[batch..., m], b[batch..., m, n] -> x[batch..., m, n]``."""
    return _solve(eqn, core_rank=1, free_dim=-1)


@rule("ormqr")
def multiply_by_q(eqn: Equation) -> OpRule:
    """``a[batch..., m, k], taus[batch..., k], c[batch..., m, n] -> q c [batch..., m, n]``, or its mirror ``c q``."""
    return _solve(eqn, core_rank=2, free_dim=-1 if eqn.params["left"] else -2)


def _solve(eqn: Equation, core_rank: int, free_dim: int) -> OpRule:
    """The last operand, ``b``, is transformed linearly, its vectors along ``free_dim`` independently."""
    builder, batch = _batched(eqn, core_rank)
    *system, b = eqn.invars
    dims = list(_behind(builder, batch, b))
    dims[free_dim] = builder.map(b.aval.shape[free_dim])
    operands = [*(_behind(builder, batch, var) for var in system), dims]
    return builder.build(operands, [dims], linear=[(len(system),)])


@rule("symmetric_product")
def symmetric_product(eqn: Equation) -> OpRule:
    """``a[batch..., n, k], c[batch..., n, n] -> alpha a aᵀ + beta c [batch..., n, n]``."""
    builder, batch = _batched(eqn, core_rank=2)
    a, c = eqn.invars
    rows = builder.whole(a.aval.shape[-2])
    square = (*batch, rows, builder.whole(c.aval.shape[-1]))
    return builder.build([(*batch, rows, builder.sum(a.aval.shape[-1])), square], [square], addends=(1,))


def _batched(eqn: Equation, core_rank: int) -> tuple[RuleBuilder, Dims]:
    """A builder that holds the batch dimensions all operands and results lead with.

    Args:
      core_rank: dimensions of the first operand behind its batch dimensions.
    """
    builder = RuleBuilder()
    shape = eqn.invars[0].aval.shape
    return builder, tuple(builder.map(size) for size in shape[: len(shape) - core_rank])


def _behind(builder: RuleBuilder, batch: Dims, var) -> Sequence[tuple[int, ...]]:
    return (*batch, *builder.whole_dims(var.aval.shape[len(batch) :]))
