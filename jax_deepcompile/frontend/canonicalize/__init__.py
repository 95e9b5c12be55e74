"""A program is written as partitioning rules expect it: one rewrite a file, each from closed jaxpr to closed jaxpr."""

from collections.abc import Callable

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, dce, open_jaxpr
from jax_deepcompile.frontend.canonicalize.batched_while import with_one_condition
from jax_deepcompile.frontend.canonicalize.broadcasts_in_loops import with_broadcasts_inside
from jax_deepcompile.frontend.canonicalize.defined_by_others import with_others_written_out
from jax_deepcompile.frontend.canonicalize.empty_arrays import without_empty_arrays
from jax_deepcompile.frontend.canonicalize.explicit_indices import without_explicit_indices
from jax_deepcompile.frontend.canonicalize.inner_products import without_ravel
from jax_deepcompile.frontend.canonicalize.narrow_residuals import with_narrow_residuals
from jax_deepcompile.frontend.canonicalize.platforms import with_branches_chosen
from jax_deepcompile.ir.program import Program

REWRITES = (
    without_empty_arrays,
    with_one_condition,
    without_ravel,
    without_explicit_indices,
    with_broadcasts_inside,
    with_narrow_residuals,
)
"""In this order. Each keeps what is computed, goes into loops and branches, and returns what needs no change."""


def canonicalize(program: Program, has_rule: Callable[[str], bool], platform: str) -> Program:
    """``program``, global and with its calls inlined, after all rewrites and without what those left dead.

    Args:
      has_rule: says of the name of a primitive whether it can be divided as it is.
      platform: of the devices, as JAX calls it: ``cuda``, ``cpu``.
    """
    closed = with_others_written_out(with_branches_chosen(program.jaxpr, platform), has_rule)
    for rewrite in REWRITES:
        closed = rewrite(closed)
    if closed is program.jaxpr:
        return program
    return program.replace(jaxpr=jex.ClosedJaxpr(dce(open_jaxpr(closed)), closed_consts(closed)))
