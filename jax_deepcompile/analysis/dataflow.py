"""Who needs whom inside one jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.extend import core as jex

from jax_deepcompile._jax_compat import has_side_effects, is_drop_var, new_jaxpr, new_var
from jax_deepcompile.ir.rewrite import Walk
from jax_deepcompile.ir.traversal import variables

T = TypeVar("T")


def alike(one, other) -> bool:
    """Whether two atoms have the same shape and dtype."""
    return one.aval.shape == other.aval.shape and one.aval.dtype == other.aval.dtype


def literal_bits(atom) -> tuple[str, bytes] | None:
    """What tells one literal from another; None for a variable."""
    return (str(atom.aval), np.asarray(atom.val).tobytes()) if isinstance(atom, jex.Literal) else None


def paired(these: Iterable, those: Iterable, known: Mapping[Any, T]) -> Iterator[tuple[Any, T]]:
    """Variables among ``these`` with what is known of their counterparts among ``those``."""
    for this, that in zip(these, those, strict=True):
        if isinstance(this, jex.Var) and isinstance(that, jex.Var) and that in known:
            yield this, known[that]


def needs(eqns: Sequence, counts: Callable[[Any], bool] = lambda eqn: True) -> list[int]:
    """For each equation those it depends on, as the bits of a number; only those that ``counts`` is true of."""
    before: dict = {}
    needed = []
    for place, eqn in enumerate(eqns):
        bits = 0
        for var in variables(eqn.invars):
            bits |= before.get(var, 0)
        needed.append(bits)
        before |= dict.fromkeys(eqn.outvars, bits | counts(eqn) << place)
    return needed


def needed_for(eqns: Sequence, targets: Iterable, effects: bool = True) -> list:
    """The equations that ``targets`` depend on, in order; and those with ``effects``."""
    wanted = set(variables(targets))
    needed = []
    for eqn in reversed(eqns):
        if (effects and has_side_effects(eqn)) or any(var in wanted for var in eqn.outvars):
            needed.append(eqn)
            wanted.update(variables(eqn.invars))
    return needed[::-1]


def slim_barriers(eqns: Sequence, targets: Iterable) -> list:
    """``eqns`` without the operands that barriers guard for nobody, and without what only those needed.

    A barrier of two is how one value is made to wait for another, and stays whole.
    """
    targets = list(targets)
    while True:
        read = {atom for eqn in eqns for atom in variables(eqn.invars)} | set(variables(targets))
        slim = [_slim(eqn, read) for eqn in eqns]
        slim = needed_for(slim, targets)
        if sum(len(eqn.invars) for eqn in slim) == sum(len(eqn.invars) for eqn in eqns):
            return slim
        eqns = slim


def with_names(jaxpr: jex.Jaxpr, names: Mapping) -> jex.Jaxpr:
    """``jaxpr`` in which variables are read by other ``names``, without what nobody needs then."""
    walk = Walk(jaxpr, names=dict(names))
    walk.eqns += walk
    return jaxpr.replace(eqns=slim_barriers(walk.eqns, walk.outvars), outvars=walk.outvars)


def given(body: jex.Jaxpr, values: Sequence[Collection]) -> jex.Jaxpr:
    """A loop's body that reads ``values`` in the place of making them: last among its inputs, its constants first.

    Each of ``values`` is the variables that have it.
    """
    made = [new_var(next(iter(names)).aval) for names in values]
    rest = with_names(body, {var: new for names, new in zip(values, made, strict=True) for var in names})
    return new_jaxpr([*body.constvars, *body.invars, *made], rest.outvars, rest.eqns)


def stays_whole(barrier) -> bool:
    """Whether a barrier keeps all its operands: of two, one waits for the other."""
    return len(barrier.invars) == 2


def _slim(eqn, read: set):
    if eqn.primitive.name != "optimization_barrier" or stays_whole(eqn):
        return eqn
    kept = [index for index, var in enumerate(eqn.outvars) if var in read and not is_drop_var(var)]
    if len(kept) == len(eqn.outvars):
        return eqn
    return eqn.replace(invars=[eqn.invars[i] for i in kept], outvars=[eqn.outvars[i] for i in kept])
