"""What a loop computes beside heavy work, without needing it, gets a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import dce, has_side_effects, is_drop_var, new_var, open_jaxpr, scan_counts


def split_light_loops(jaxpr: jex.Jaxpr, is_heavy: Callable[[Any], bool]) -> jex.Jaxpr:
    """``jaxpr`` with every scan split in two that makes some results of heavy work and carries others without.

    What a loop counts beside can then be known before the heavy work is begun. Stacked results stay with the heavy
    work. Without such a scan ``jaxpr`` itself comes back.

    Before::

        n, s = scan(carry n, s; x, mask): n + sum(mask), s + sum(dot(x, w) * mask)

    After::

        n = scan(carry n; mask): n + sum(mask)
        s = scan(carry s; x, mask): s + sum(dot(x, w) * mask)

    Guarantees: values are bitwise the same; heavy work is done, and what has side effects happens, as often as before.

    Args:
      jaxpr: an open jaxpr; only scans that are not in other loops are split.
      is_heavy: whether an equation is heavy work, or has some inside.
    """
    heavy: set = set()
    eqns = []
    for eqn in jaxpr.eqns:
        results = _heavy_results(eqn, heavy, is_heavy)
        heavy.update(eqn.outvars[index] for index in results)
        splits = eqn.primitive.name == "scan" and results and not has_side_effects(eqn)
        light = _used_carry(eqn) - results if splits else set()
        rest = set(range(len(eqn.outvars))) - light
        eqns += [_keeping(eqn, light), _keeping(eqn, rest)] if light else [eqn]
    return dce(jaxpr.replace(eqns=eqns)) if len(eqns) > len(jaxpr.eqns) else jaxpr


def _heavy_results(eqn, heavy: set, is_heavy: Callable[[Any], bool]) -> set[int]:
    """The results of ``eqn`` that take heavy work, in it or, as ``heavy`` knows, before it."""
    if eqn.primitive.name == "scan":
        return _heavy_results_of_scan(eqn, heavy, is_heavy)
    return set(range(len(eqn.outvars))) if is_heavy(eqn) or _reads(eqn.invars, heavy) else set()


def _heavy_results_of_scan(eqn, heavy: set, is_heavy: Callable[[Any], bool]) -> set[int]:
    body = open_jaxpr(eqn.params["jaxpr"])
    num_consts, num_carry = scan_counts(eqn)
    carried = body.invars[num_consts : num_consts + num_carry]
    inside = {var for var, atom in zip(body.invars, eqn.invars, strict=True) if _reads([atom], heavy)}
    while True:
        made = set(inside)
        for inner in body.eqns:
            if is_heavy(inner) or _reads(inner.invars, made):
                made.update(inner.outvars)
        results = {index for index, atom in enumerate(body.outvars) if _reads([atom], made)}
        grown = inside | {var for index, var in enumerate(carried) if index in results}
        if grown == inside:
            return results
        inside = grown


def _reads(atoms: Sequence, variables: set) -> bool:
    return any(not isinstance(atom, jex.Literal) and atom in variables for atom in atoms)


def _used_carry(eqn) -> set[int]:
    """The results of a scan that it carried to the end."""
    _, num_carry = scan_counts(eqn)
    return {index for index, var in enumerate(eqn.outvars[:num_carry]) if not is_drop_var(var)}


def _keeping(eqn, kept: set[int]) -> Any:
    """``eqn`` with other names for all results but those ``kept``, so that nothing reads them."""
    return eqn.replace(outvars=[var if index in kept else new_var(var.aval) for index, var in enumerate(eqn.outvars)])
