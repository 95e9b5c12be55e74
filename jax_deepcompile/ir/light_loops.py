"""What a loop computes beside heavy work, without needing it, gets a loop of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import dce, has_side_effects, is_drop_var, new_var
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.rewrite import Walk
from jax_deepcompile.ir.traversal import variables


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
    walk = Walk(jaxpr)
    for eqn in walk:
        results = _heavy_results(eqn, heavy, is_heavy)
        heavy.update(eqn.outvars[index] for index in results)
        splits = eqn.primitive.name == "scan" and results and not has_side_effects(eqn)
        light = _used_carry(eqn) - results if splits else set()
        rest = set(range(len(eqn.outvars))) - light
        walk.eqns += [_keeping(eqn, light), _keeping(eqn, rest)] if light else [eqn]
    split = walk.result()
    return jaxpr if split is jaxpr else dce(split)


def _heavy_results(eqn, heavy: set, is_heavy: Callable[[Any], bool]) -> set[int]:
    """The results of ``eqn`` that take heavy work, in it or, as ``heavy`` knows, before it."""
    if eqn.primitive.name == "scan":
        return _heavy_results_of_scan(eqn, heavy, is_heavy)
    return set(range(len(eqn.outvars))) if is_heavy(eqn) or not heavy.isdisjoint(variables(eqn.invars)) else set()


def _heavy_results_of_scan(eqn, heavy: set, is_heavy: Callable[[Any], bool]) -> set[int]:
    body, carried = Scan(eqn).body, Scan(eqn).inputs.carry
    given = zip(body.invars, eqn.invars, strict=True)
    inside = {var for var, atom in given if not heavy.isdisjoint(variables([atom]))}
    while True:
        made = set(inside)
        for inner in body.eqns:
            if is_heavy(inner) or not made.isdisjoint(variables(inner.invars)):
                made.update(inner.outvars)
        results = {index for index, atom in enumerate(body.outvars) if not made.isdisjoint(variables([atom]))}
        grown = inside | {var for index, var in enumerate(carried) if index in results}
        if grown == inside:
            return results
        inside = grown


def _used_carry(eqn) -> set[int]:
    """The results of a scan that it carried to the end."""
    return {index for index, var in enumerate(Scan(eqn).results.carry) if not is_drop_var(var)}


def _keeping(eqn, kept: set[int]) -> Any:
    """``eqn`` with other names for all results but those ``kept``, so that nothing reads them."""
    return eqn.replace(outvars=[var if index in kept else new_var(var.aval) for index, var in enumerate(eqn.outvars)])
