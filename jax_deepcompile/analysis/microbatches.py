"""What a loop over microbatches computes in every iteration, what it adds up, and what stays outside of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import has_side_effects, user_line
from jax_deepcompile.analysis.dataflow import needed_for, reached_from, slim_barriers, variables
from jax_deepcompile.ir.traversal import equations, nested_jaxprs

_COMBINED = frozenset({"psum", "pmax", "pmin", "all_gather"})
"""Collectives that have a meaning over iterations: their running total, extremum, or all of them side by side."""

_MATRIX_WORK = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "fft", "pallas_call"}
_LINEAR_ALGEBRA = {"cholesky", "lu", "qr", "svd", "eigh", "triangular_solve"}
_COMMUNICATION = {"all_gather", "reduce_scatter", "all_to_all", "ppermute", "psum", "pmax", "pmin"}
_HEAVY = _MATRIX_WORK | _LINEAR_ALGEBRA | _COMMUNICATION | {"scan", "while", "cond", "sort", "custom_call"}
"""Work that is not done twice so that a sum over the batch can be known early."""


@dataclass(frozen=True)
class Total:
    """One value combined over the iterations of a loop.

    Attributes:
      how: the collective over the virtual axis it stands for; "last" for a value that all iterations have in common.
      source: the variable in an iteration.
      result: the variable that is known after the loop.
      eqn: the collective; None for "last".
    """

    how: str
    source: Any
    result: Any
    eqn: Any = None


@dataclass(frozen=True)
class Round:
    """One loop over the microbatches.

    Attributes:
      before: equations computed once, ahead of it.
      body: equations computed in every iteration.
      totals: what comes out of it.
    """

    before: tuple
    body: tuple
    totals: tuple[Total, ...]


@dataclass(frozen=True)
class Rounds:
    """A program as loops over microbatches.

    Attributes:
      loops: the loops, in order; all but the last are short ones, for what the batch has to tell in advance.
      after: equations computed once, at the end.
      repeated: collectives over the virtual axis whose operand is the same in every iteration.
      indices: equations, those of nested jaxprs included, that ask for the number of the iteration.
    """

    loops: tuple[Round, ...]
    after: tuple
    repeated: tuple
    indices: tuple


def choose_rounds(jaxpr: jex.Jaxpr, axis: str, length: int) -> Rounds:
    """Divides a local program that refers to the virtual axis ``axis`` among loops and what is outside of them.

    What differs between iterations (it depends on the axis's index) goes into the last loop that is early enough for
    those who read its total. What does not differ is computed outside, unless it is larger than what it is made of: a
    gathered parameter, or a bias for every example, is made again in each iteration rather than kept through all.

    Args:
      jaxpr: the program.
      axis: the virtual axis.
      length: how many microbatches there are.

    Raises:
      WholeBatchNeededError: a total has to be known before work that it depends on itself could go on.
    """
    _refuse_exchanges(jaxpr, axis, length)
    eqns = list(jaxpr.eqns)
    combining = [eqn for eqn in eqns if _is_over(eqn, axis) and eqn.primitive.name in _COMBINED]
    plain = [eqn for eqn in eqns if eqn not in combining]
    indices = tuple(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "axis_index" and _is_over(eqn, axis))
    varying = reached_from(plain, {var for eqn in plain if _asks(eqn, indices) for var in eqn.outvars})
    reductions = [eqn for eqn in combining if any(var in varying for var in variables(eqn.invars))]
    totals = [total for eqn in reductions for total in _totals(eqn)]
    totals += [Total("last", var, var) for var in dict.fromkeys(variables(jaxpr.outvars)) if var in varying]
    still = [eqn for eqn in eqns if eqn not in reductions]
    loops = _loops(still, totals, _depths(eqns, totals), varying)
    _refuse_repetition(loops, still, length)
    done = {id(eqn) for loop in loops for eqn in loop.before}
    outside = [eqn for eqn in still if id(eqn) not in done and not any(var in varying for var in eqn.outvars)]
    repeated = tuple(eqn for eqn in combining if eqn not in reductions)
    return Rounds(loops, tuple(needed_for(outside, jaxpr.outvars)), repeated, indices)


def _is_over(eqn, axis: str) -> bool:
    names = [eqn.params.get("axes", ()), eqn.params.get("axis_name", ())]
    return any(axis in (name if isinstance(name, (tuple, list)) else (name,)) for name in names)


def _asks(eqn, indices: Sequence) -> bool:
    asking = {id(index) for index in indices}
    return id(eqn) in asking or any(id(inner) in asking for body in nested_jaxprs(eqn) for inner in equations(body))


def _totals(eqn) -> Iterator[Total]:
    for source, result in zip(eqn.invars, eqn.outvars, strict=True):
        yield Total(eqn.primitive.name, source, result, eqn)


def _depths(eqns: Sequence, totals: Sequence[Total]) -> list[int]:
    """For each total the longest chain of totals that cannot be known before it."""
    reduces = {id(total.eqn) for total in totals if total.eqn is not None}
    waiting = {total.source: 1 for total in totals if total.eqn is None}
    for eqn in reversed(eqns):
        rest = max((waiting.get(var, 0) for var in eqn.outvars), default=0) + (id(eqn) in reduces)
        for var in variables(eqn.invars):
            waiting[var] = max(waiting.get(var, 0), rest)
    return [waiting.get(total.result, 0) if total.eqn is not None else 0 for total in totals]


def _loops(eqns: Sequence, totals: Sequence[Total], depths: Sequence[int], varying: set) -> tuple[Round, ...]:
    loops: list[Round] = []
    done: set[int] = set()
    for depth in range(max(depths, default=-1), -1, -1):
        wanted = tuple(total for total, own in zip(totals, depths, strict=True) if own == depth)
        needed = _needed(eqns, wanted, varying if depth == 0 else set())
        before, body = _split([eqn for eqn in needed if id(eqn) not in done], varying)
        done |= {id(eqn) for eqn in before}
        loops.append(Round(tuple(before), tuple(body), wanted))
    return tuple(loops)


def _needed(eqns: Sequence, totals: Sequence[Total], effects_on: set) -> list:
    """The equations behind ``totals``; with them those with effects that tell of a variable in ``effects_on``."""
    acting = [eqn for eqn in eqns if has_side_effects(eqn) and any(v in effects_on for v in variables(eqn.invars))]
    targets = [total.source for total in totals] + [var for eqn in acting for var in eqn.invars]
    needed = {id(eqn) for eqn in (*acting, *needed_for(eqns, targets, effects=False))}
    return slim_barriers([eqn for eqn in eqns if id(eqn) in needed], targets)


def _split(eqns: Sequence, varying: set) -> tuple[list, list]:
    """``(before, body)`` of a loop that needs ``eqns``."""
    before, body = [], []
    inside = set(varying)
    for eqn in eqns:
        if any(var in inside for var in (*variables(eqn.invars), *eqn.outvars)) or _grows(eqn):
            inside.update(eqn.outvars)
            body.append(eqn)
        else:
            before.append(eqn)
    return before, body


def _grows(eqn) -> bool:
    return _bytes(eqn.outvars) > _bytes(eqn.invars)


def _bytes(atoms: Sequence) -> int:
    return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in atoms)


def _refuse_exchanges(jaxpr: jex.Jaxpr, axis: str, length: int) -> None:
    """Iterations can exchange nothing, and what a loop inside an iteration needs must be known in it."""
    outer = {id(eqn) for eqn in jaxpr.eqns}
    for eqn in equations(jaxpr):
        name = eqn.primitive.name
        if not _is_over(eqn, axis) or name == "axis_index" or (id(eqn) in outer and name in _COMBINED):
            continue
        nested = "a loop or branch of the step goes on with the result"
        reason = nested if id(eqn) not in outer else "parts of examples would change places"
        raise errors.WholeBatchNeededError(name, user_line(eqn), length, reason)


def _refuse_repetition(loops: Sequence[Round], eqns: Sequence, length: int) -> None:
    """A total that is read in a later loop costs a loop of its own, which must be short and must not keep the batch."""
    for number, loop in enumerate(loops[:-1]):
        later = {id(eqn) for other in loops[number + 1 :] for eqn in other.body if eqn.primitive.name in _HEAVY}
        for total in loop.totals:
            behind = needed_for(loop.body, [total.source], effects=False)
            twice = sorted((eqn for eqn in behind if id(eqn) in later), key=_communicates)
            if total.how == "all_gather":
                named = next(eqn for eqn in eqns if total.result in variables(eqn.invars))
                reason = "the step goes on with examples of other microbatches"
            elif twice:
                named = next((eqn for eqn in eqns if total.source in eqn.outvars), total.eqn)
                reason = f"the step goes on with the result, and {_name(twice[0])} would be computed again for that"
            else:
                continue
            raise errors.WholeBatchNeededError(named.primitive.name, user_line(named), length, reason)


def _communicates(eqn) -> bool:
    return eqn.primitive.name in _COMMUNICATION


def _name(eqn) -> str:
    return f"{eqn.primitive.name} at {user_line(eqn)}"
