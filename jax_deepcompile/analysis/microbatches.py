"""What a loop over microbatches computes in every iteration, what it adds up, and what stays outside of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend import core as jex

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import has_side_effects, new_var, user_line
from jax_deepcompile.analysis.dataflow import needed_for, needs, slim_barriers, stays_whole, variables
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import COLLECTIVES, EXPENSIVE, PRODUCTS, RUNNING, axis_names
from jax_deepcompile.ir.rewrite import renamed, unguarded, with_renamed_operands, without_barriers
from jax_deepcompile.ir.traversal import contains, equations, inside, reached_from

_MEANING = {
    "psum": "a sum over examples",
    "pmax": "a maximum over examples",
    "pmin": "a minimum over examples",
    "reduce_scatter": "a sum over examples",
    "all_gather": "an array of all examples",
    "all_to_all": "an array of all examples",
    "ppermute": "examples in another order",
    "dynamic_slice": "an array of all examples",
}
"""What stands in a user's line where the program has a collective, or reads what one made."""

_MIX_BEFORE = (
    "Bring examples together (shuffles, mixup) before the step, and where several belong together, as all answers to a "
    "question do, choose a batch of which every device has whole groups in every microbatch"
)
_NOT_IN_LOOPS = "Take out of the loop or branch what needs all examples, or call what has none inside"
_EXAMPLES_ALONE = (
    "Make what the loss is a sum or mean over examples of from each example alone (LayerNorm or GroupNorm in the place "
    "of BatchNorm, counts and weights from the batch, no function of a mean)"
)
"""Remedies."""

_HEAVY = PRODUCTS | EXPENSIVE | COLLECTIVES.keys() | {"while"}


def is_heavy(eqn) -> bool:
    """Whether ``eqn`` is, or has inside, work that is not done twice so that a total can be known early."""
    return contains(eqn, _HEAVY)


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
      read: variables of earlier loops' iterations that it goes on with, each iteration with its own.
      kept: variables of its iterations that later loops read.
    """

    before: tuple
    body: tuple
    totals: tuple[Total, ...]
    read: tuple = ()
    kept: tuple = ()


@dataclass(frozen=True)
class Rounds:
    """A program as loops over microbatches.

    Attributes:
      loops: the loops, in order.
      after: equations computed once, at the end.
      repeated: collectives over the virtual axis whose operand is the same in every iteration.
      indices: equations, those of nested jaxprs included, that ask for the number of the iteration.
    """

    loops: tuple[Round, ...]
    after: tuple
    repeated: tuple
    indices: tuple


def choose_rounds(jaxpr: jex.Jaxpr, axis: str, length: int, kept_bytes: int = 0) -> Rounds:
    """Divides a local program that refers to the virtual axis ``axis`` among loops and what is outside of them.

    What differs between iterations (it depends on the axis's index) goes into a loop, all of it into one if nothing in
    it waits for a total. If something does, totals that are cheap and waited for (how many tokens count) get a short
    loop in advance; heavy work is done in one loop only, and what later ones need of it is kept, if it is small (the
    loss of every example, for its deviation). What does not differ is computed outside, unless it is larger than what
    it is made of: a gathered parameter, or a bias for every example, is made again in each iteration.

    Args:
      kept_bytes: how much may be kept, all microbatches together.

    Raises:
      WholeBatchNeededError: too much would have to be kept, or examples of different microbatches meet.
    """
    _refuse_exchanges(jaxpr, axis, length)
    flow = _read_flow(jaxpr, axis)
    loops = _loops(flow, list(_groups(flow)))
    _refuse_hoards(flow, loops, length, kept_bytes)
    done = {id(eqn) for loop in loops for eqn in loop.before}
    outside = [eqn for eqn in flow.eqns if id(eqn) not in done and not flow.varies(eqn)]
    return Rounds(loops, tuple(needed_for(outside, jaxpr.outvars)), flow.repeated, flow.indices)


@dataclass(frozen=True)
class _Flow:
    """What depends on what in a program.

    Attributes:
      eqns: its equations, without those that make totals.
      totals: what is combined over iterations.
      needs: for each total's result the results of totals that it depends on.
      varying: variables that differ between iterations.
      costly: those of them that take heavy work.
      repeated, indices: as in ``Rounds``.
    """

    eqns: tuple
    totals: tuple[Total, ...]
    needs: dict
    varying: set
    costly: set
    repeated: tuple
    indices: tuple

    def varies(self, eqn) -> bool:
        return any(var in self.varying for var in eqn.outvars) or any(v in self.varying for v in variables(eqn.invars))


def _read_flow(jaxpr: jex.Jaxpr, axis: str) -> _Flow:
    jaxpr = _without_waits(jaxpr, _combining(jaxpr, axis), lambda eqn: _asks(eqn, axis))
    combining = _combining(jaxpr, axis)
    plain = _without(jaxpr.eqns, combining)
    indices = tuple(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "axis_index" and axis in axis_names(eqn))
    varying = reached_from(plain, {var for eqn in plain if _asks(eqn, axis) for var in eqn.outvars})
    reductions = [eqn for eqn in combining if any(var in varying for var in variables(eqn.invars))]
    totals = [
        Total(eqn.primitive.name, source, result, eqn)
        for eqn in reductions
        for source, result in zip(eqn.invars, eqn.outvars, strict=True)
    ]
    totals += [Total("last", var, var) for var in dict.fromkeys(variables(jaxpr.outvars)) if var in varying]
    heavy = [eqn for eqn in plain if is_heavy(eqn) and any(var in varying for var in eqn.outvars)]
    return _Flow(
        tuple(_without(jaxpr.eqns, reductions)),
        tuple(totals),
        _needs(jaxpr.eqns, totals),
        varying,
        reached_from(plain, {var for eqn in heavy for var in eqn.outvars}),
        tuple(_without(combining, reductions)),
        indices,
    )


def _without_waits(jaxpr: jex.Jaxpr, combining: Sequence, differs: Callable[[Any], bool]) -> jex.Jaxpr:
    """``jaxpr`` in which nothing that goes on with a total reads what merely waits for a microbatch.

    A parameter that is gathered again for the backward pass waits for an activation, so that nobody keeps it until
    then. What its gradient, once that is complete, is multiplied by need not wait.

    Before, with ``x`` of a microbatch::

        v, _ = optimization_barrier w x; W = all_gather v; y = dot x W; t = psum y; g = mul t W

    After::

        v, _ = optimization_barrier w x; W = all_gather v; y = dot x W; t = psum y; U = all_gather w; g = mul t U

    Args:
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


def _combining(jaxpr: jex.Jaxpr, axis: str) -> list:
    """Equations that make totals."""
    return [eqn for eqn in jaxpr.eqns if axis in axis_names(eqn) and eqn.primitive.name in RUNNING]


def _without(eqns: Sequence, others: Sequence) -> list:
    left_out = {id(eqn) for eqn in others}
    return [eqn for eqn in eqns if id(eqn) not in left_out]


def _asks(eqn, axis: str) -> bool:
    """Whether ``eqn`` or an equation inside it reads the number of the iteration."""
    return any(each.primitive.name == "axis_index" and axis in axis_names(each) for each in (eqn, *inside(eqn)))


def _needs(eqns: Sequence, totals: Sequence[Total]) -> dict:
    made = {total.result: total for total in totals if total.eqn is not None}
    behind: dict = {}
    needs: dict = {}
    for eqn in eqns:
        union = frozenset().union(*(behind.get(var, frozenset()) for var in variables(eqn.invars)))
        for var in eqn.outvars:
            behind[var] = union | {var} if var in made else union
            if var in made:
                needs[var] = union
    return needs | {total.result: behind.get(total.source, frozenset()) for total in totals if total.eqn is None}


def _groups(flow: _Flow) -> Iterator[list[Total]]:
    """The totals of each loop.

    A total that nothing waits for, a metric, is found in a later loop if that does heavy work of its which this one
    does not.
    """
    waiting, known = list(flow.totals), set()
    behind = _heavy_behind(flow)
    while waiting:
        ready = [total for total in waiting if flow.needs[total.result] <= known]
        if len(ready) < len(waiting):
            results = frozenset().union(*(flow.needs[total.result] for total in waiting))
            awaited = [total for total in ready if total.result in results]
            light = [total for total in awaited if total.source not in flow.costly]
            now = _work(behind, awaited)
            later = _work(behind, [total for total in waiting if not flow.needs[total.result] <= known])
            only_later = later & ~now
            ready = light or [
                total for total in ready if total.result in results or not behind.get(total.source, 0) & only_later
            ]
        assert ready, "totals of which each waits for another"
        yield ready
        found = {total.result for total in ready}
        known |= found
        waiting = [total for total in waiting if total.result not in found]


def _work(behind: dict, totals: Sequence[Total]) -> int:
    return functools.reduce(operator.or_, (behind.get(total.source, 0) for total in totals), 0)


def _heavy_behind(flow: _Flow) -> dict:
    """For each variable a bit for every piece of heavy work that goes into it, what goes through totals aside."""

    def weighs(eqn) -> bool:
        return is_heavy(eqn) and flow.varies(eqn)

    return {
        var: bits | weighs(eqn) << place
        for place, (eqn, bits) in enumerate(zip(flow.eqns, needs(flow.eqns, weighs), strict=True))
        for var in eqn.outvars
    }


def _loops(flow: _Flow, groups: Sequence[Sequence[Total]]) -> tuple[Round, ...]:
    loops: list[Round] = []
    for number, totals in enumerate(groups):
        ran = {var for loop in loops for eqn in loop.body for var in eqn.outvars}
        done = {id(eqn) for loop in loops for eqn in loop.before}
        acting = _acting(flow, ran) if number == len(groups) - 1 else []
        targets = [*(total.source for total in totals), *(var for eqn in acting for var in variables(eqn.invars))]
        needed, read = _behind(flow, targets, flow.costly & ran)
        chosen = {id(eqn) for eqn in (*needed, *acting)} - done
        before, body = _split([eqn for eqn in flow.eqns if id(eqn) in chosen], flow.varying)
        loops = [replace(loop, kept=(*loop.kept, *(var for var in read if _makes(loop, var)))) for loop in loops]
        loops.append(Round(tuple(before), tuple(slim_barriers(body, targets)), tuple(totals), read))
    return tuple(loops)


def _acting(flow: _Flow, ran: set) -> list:
    """Equations with side effects in one microbatch that no loop has yet."""
    acting = [eqn for eqn in flow.eqns if has_side_effects(eqn) and flow.varies(eqn)]
    return [eqn for eqn in acting if not any(var in ran for var in eqn.outvars)]


def _makes(loop: Round, var) -> bool:
    return var not in loop.kept and any(var in eqn.outvars for eqn in loop.body)


def _behind(flow: _Flow, targets: Sequence, given: set) -> tuple[list, tuple]:
    """The equations behind ``targets``, and those variables of ``given`` that they start from."""
    wanted = dict.fromkeys(variables(targets))
    needed = []
    for eqn in reversed(flow.eqns):
        results = [index for index, var in enumerate(eqn.outvars) if var in wanted and var not in given]
        if results:
            needed.append(eqn)
            slim = eqn.primitive.name == "optimization_barrier" and flow.varies(eqn) and not stays_whole(eqn)
            operands = [eqn.invars[index] for index in results] if slim else eqn.invars
            wanted.update(dict.fromkeys(variables(operands)))
    return needed[::-1], tuple(var for var in wanted if var in given)


def _split(eqns: Sequence, varying: set) -> tuple[list, list]:
    """``(before, body)`` of a loop that needs ``eqns``."""
    before, body = [], []
    inside = set(varying)
    for eqn in eqns:
        grows = _bytes(eqn.outvars) > _bytes(eqn.invars)
        if grows or any(var in inside for var in (*variables(eqn.invars), *eqn.outvars)):
            inside.update(eqn.outvars)
            body.append(eqn)
        else:
            before.append(eqn)
    return before, body


def _bytes(atoms: Sequence) -> int:
    return sum(map(size_bytes, atoms))


def _refuse_exchanges(jaxpr: jex.Jaxpr, axis: str, length: int) -> None:
    """Iterations can exchange nothing, and what a loop inside an iteration needs must be known in it."""
    outer = {id(eqn) for eqn in jaxpr.eqns}
    for eqn in equations(jaxpr):
        name = eqn.primitive.name
        if axis not in axis_names(eqn) or name == "axis_index" or (id(eqn) in outer and name in RUNNING):
            continue
        reason, remedy = "parts of examples would change places", _MIX_BEFORE
        if id(eqn) not in outer:
            reason = "a loop or branch, there or in what is called there, goes on with the result"
            remedy = _NOT_IN_LOOPS
        raise _needed(eqn, length, reason, remedy)


def _needed(eqn, length: int, reason: str, remedy: str) -> errors.WholeBatchNeededError:
    what = _MEANING.get(eqn.primitive.name) or str(eqn.primitive.name)
    return errors.WholeBatchNeededError(what, user_line(eqn), length, reason, remedy)


def _refuse_hoards(flow: _Flow, loops: Sequence[Round], length: int, kept_bytes: int) -> None:
    """What is kept for later loops must be little, and no microbatch may read examples of another."""
    kept = sum(_bytes(loop.kept) for loop in loops) * length
    for loop in loops[1:]:
        results = frozenset().union(*(flow.needs[total.result] for total in loop.totals))
        awaited = [total for total in flow.totals if total.result in results]
        awaited.sort(key=lambda total: total.how != "all_gather")
        if awaited and awaited[0].how == "all_gather":
            reader = next(eqn for eqn in flow.eqns if awaited[0].result in variables(eqn.invars))
            raise _needed(reader, length, "the step goes on with examples of other microbatches", _MIX_BEFORE)
        if loop.read and kept > kept_bytes:
            again = _maker(loop.read[0], flow)
            maker = _maker(next((total.source for total in awaited if total.source in flow.costly), loop.read[0]), flow)
            reason = (
                f"the step goes on with the result, and {again.primitive.name} at {user_line(again)} would have to be "
                f"done again for that, or its results kept for all microbatches"
            )
            raise _needed(maker, length, reason, _EXAMPLES_ALONE)


def _maker(var, flow: _Flow):
    return next(eqn for eqn in flow.eqns if var in eqn.outvars)
