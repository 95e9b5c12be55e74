"""Values that wait for a microbatch, though they are the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import has_side_effects, new_var
from jax_deepcompile.analysis.dataflow import reached_from, unguarded, variables, without_barriers
from jax_deepcompile.ir.rewrite import renamed, with_renamed_operands


def without_waits(jaxpr: jex.Jaxpr, combining: Sequence, differs: Callable[[Any], bool]) -> jex.Jaxpr:
    """``jaxpr`` in which nothing that goes on with a total reads what merely waits for a microbatch.

    A parameter that is gathered again for the backward pass waits for an activation, so that nobody keeps it until
    then. What its gradient, once that is complete, is multiplied by need not wait.

    Before, with ``x`` of a microbatch::

        v, _ = optimization_barrier w x; W = all_gather v; y = dot x W; t = psum y; g = mul t W

    After::

        v, _ = optimization_barrier w x; W = all_gather v; y = dot x W; t = psum y; U = all_gather w; g = mul t U

    Args:
      jaxpr: a local program.
      combining: its equations that make totals.
      differs: whether what an equation makes differs between microbatches, whatever its operands.
    """
    totals = {id(eqn) for eqn in combining}
    plain = jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if id(eqn) not in totals])
    sources = {var for eqn in plain.eqns if differs(eqn) for var in eqn.outvars}
    guarded = unguarded(plain)
    varying = reached_from(plain.eqns, sources)
    by_value = reached_from(without_barriers(plain).eqns, sources)
    waiting = {var for var in varying - by_value if by_value.isdisjoint(variables([guarded.get(var, var)]))}
    made = {var for eqn in combining if not varying.isdisjoint(variables(eqn.invars)) for var in eqn.outvars}
    behind = reached_from(jaxpr.eqns, made)
    waiting -= behind
    if not waiting:
        return jaxpr
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    names: dict[Any, Any] = {}
    eqns: list[jex.JaxprEqn] = []

    def set_apart(var) -> None:
        """Makes ``var`` once more, from what waits for nothing."""
        if var in names or var not in waiting or has_side_effects(makers[var]):
            return
        maker = makers[var]
        operands = variables([guarded[var]] if var in guarded else maker.invars)
        for atom in operands:
            set_apart(atom)
        if var in guarded:
            names[var] = renamed(guarded[var], names)
            return
        results = [new_var(result.aval) for result in maker.outvars]
        names.update(zip(maker.outvars, results, strict=True))
        eqns.append(with_renamed_operands(maker, names).replace(outvars=results))

    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "optimization_barrier" and any(atom in behind for atom in variables(eqn.invars)):
            for atom in variables(eqn.invars):
                set_apart(atom)
            eqn = with_renamed_operands(eqn, names)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)
