"""The forward pass of the next microbatch beside the backward pass of this one, layer by layer.

Gathers make forward wait for the network where backward, which gathers as much and computes twice or three times as
much, does not; side by side, one's compute hides the other's communication.

Before, with both layer loops pipelined::

    scan(k): r = scan(t): forward(x[k]); p = head(r); s = s + scan(t): backward(p, r)

After::

    r = scan(t): forward(x[0])
    while k < n - 1: p = head(r); r, s = scan(t): forward(x[k + 1]), s + backward(p, r)
    p = head(r); s = s + scan(t): backward(p, r)

Guarantees: values are bitwise the same; every layer is gathered and reduced exactly as often as before, parameters that
the loop over microbatches keeps gathered once for all three parts; what forward leaves for backward is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_deepcompile import errors
from jax_deepcompile._jax_compat import eval_local, has_side_effects, open_jaxpr, provenance, scan_counts
from jax_deepcompile.analysis.dataflow import free_variables, needed_for, reached_from, slim_barriers, variables
from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.analysis.loops import Loop, constants_of
from jax_deepcompile.ir.retrace import Compute, compute, read, split_operands
from jax_deepcompile.ir.traversal import equations
from jax_deepcompile.passes.uncounted_loops import run_uncounted

_MOST_PEELED = 2
"""Iterations by which the two layer loops may differ."""


@dataclass(frozen=True)
class Halves:
    """One iteration of a loop over microbatches in two halves, of which the first can run an iteration ahead.

    Attributes:
      eqn: the loop over microbatches, a ``scan``.
      forward: the layer loop of the first half, the last equation of ``ahead``.
      backward: the layer loop of the second half that it runs beside.
      ahead: the first half: equations that need nothing that microbatches hand to one another.
      rest: the second half, ``backward`` among them; what is alike for all microbatches it computes again.
      handed: what the second half needs of the first.
    """

    eqn: Any
    forward: Any
    backward: Any
    ahead: Sequence
    rest: Sequence
    handed: Sequence

    @property
    def handed_bytes(self) -> int:
        """What is in memory twice."""
        return sum(map(size_bytes, self.handed))

    @property
    def turns(self) -> bool:
        """Whether only ``backward`` reduces gradients."""
        return _reduces(self.backward) and not _reduces(self.forward)

    @cached_property
    def before(self) -> list:
        """What of the second half ``backward`` needs."""
        others = [eqn for eqn in self.rest if eqn is not self.backward]
        return needed_for(others, self.backward.invars, effects=False)

    @cached_property
    def after(self) -> list:
        """The second half without ``before`` and ``backward``."""
        first = {id(eqn) for eqn in (*self.before, self.backward)}
        return [eqn for eqn in self.rest if id(eqn) not in first]


def find_halves(eqn) -> Halves | None:
    """The halves of a loop over microbatches, if it has a pair of pipelined layer loops that can run side by side.

    Of several pairs the longest of a loop that reduces gradients and one that does not, nearest to each other.
    """
    body = open_jaxpr(eqn.params["jaxpr"])
    if eqn.params["length"] < 2 or any(map(has_side_effects, body.eqns)):
        return None
    loops = [inner for inner in body.eqns if _is_carried(inner)]
    found = [
        halves
        for place, backward in enumerate(loops)
        for forward in loops[:place][::-1]
        if abs(forward.params["length"] - backward.params["length"]) <= _MOST_PEELED
        if (halves := _halves(eqn, body, forward, backward)) is not None
    ]
    return max(found, key=lambda halves: (halves.turns, halves.backward.params["length"]), default=None)


def _is_carried(eqn) -> bool:
    """Whether ``eqn`` is a loop that reads and writes stacks by index, as pipelined ones do."""
    if eqn.primitive.name != "scan":
        return False
    num_consts, num_carry = scan_counts(eqn)
    return num_consts + num_carry == len(eqn.invars) and num_carry == len(eqn.outvars)


def _reduces(eqn) -> bool:
    return any(inner.primitive.name == "reduce_scatter" for inner in equations(eqn.params["jaxpr"]))


def _halves(eqn, body, forward, backward) -> Halves | None:
    num_consts, num_carry = scan_counts(eqn)
    carried = set(body.invars[num_consts : num_consts + num_carry])
    if reached_from(body.eqns, forward.outvars).isdisjoint(variables(backward.invars)):
        return None
    ahead = slim_barriers(needed_for(body.eqns, forward.outvars), forward.outvars)
    if carried.intersection(free_variables(ahead, forward.outvars)):
        return None
    own = reached_from(body.eqns, body.invars[num_consts + num_carry :])
    made = {var for other in ahead for var in other.outvars if var in own or other.primitive.name == "all_gather"}
    made |= set(forward.outvars)
    rest = needed_for([other for other in body.eqns if not made.issuperset(other.outvars)], body.outvars)
    handed = [var for var in free_variables(rest, body.outvars) if var in made]
    return Halves(eqn, forward, backward, ahead, rest, handed)


def overlapped(loop: Loop) -> Compute:
    """The way to run a loop over microbatches that has halves with each first half an iteration ahead."""
    halves = find_halves(loop.eqn)
    if halves is None:
        raise errors.PlanError(
            "the plan", f"it overlaps the iterations of {loop.name}, which has no two layer loops to run side by side"
        )
    return lambda _, operands: _Microbatches(halves, operands).run()


@dataclass(frozen=True)
class _State:
    """What flows from one microbatch to the next.

    Attributes:
      carry: the loop's own carry.
      handed: what the first half of the coming microbatch left for its second half.
      outs: the stacked outputs so far.
    """

    carry: Sequence
    handed: Sequence
    outs: Sequence


jax.tree_util.register_dataclass(_State, ["carry", "handed", "outs"], [])


@dataclass(frozen=True)
class _Microbatches:
    """The loop's halves on its operands."""

    halves: Halves
    operands: list

    def run(self) -> list:
        halves, length = self.halves, self.halves.eqn.params["length"]
        _, carry, _ = split_operands(halves.eqn, self.operands)
        first = compute(halves.ahead, self._given(0))
        outs = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in halves.eqn.outvars[len(carry) :]]
        state = _State(carry, [first[var] for var in halves.handed], outs)
        state = run_uncounted(length - 1, self._trip, state)
        last = compute([halves.backward], self._until_backward(length - 1, state))
        carry, outs = self._finished(length - 1, last, state.outs)
        return [*carry, *outs]

    def _trip(self, turn, state: _State) -> _State:
        halves = self.halves
        mine, coming = self._until_backward(turn, state), compute(halves.ahead[:-1], self._given(turn + 1))
        loops = (halves.forward, coming), (halves.backward, mine)
        results = _side_by_side([(eqn, [read(atom, known) for atom in eqn.invars]) for eqn, known in loops])
        for (eqn, known), made in zip(loops, results, strict=True):
            known |= dict(zip(eqn.outvars, made, strict=True))
        carry, outs = self._finished(turn, mine, state.outs)
        return _State(carry, [coming[var] for var in halves.handed], outs)

    def _given(self, turn) -> dict:
        """What all microbatches read, and what the one whose turn it is does."""
        eqn = self.halves.eqn
        body = open_jaxpr(eqn.params["jaxpr"])
        consts, carry, stacks = split_operands(eqn, self.operands)
        slices = [lax.dynamic_index_in_dim(stack, self._place(turn), keepdims=False) for stack in stacks]
        sliced = body.invars[len(consts) + len(carry) :]
        return constants_of(eqn) | dict(zip((*body.invars[: len(consts)], *sliced), (*consts, *slices), strict=True))

    def _until_backward(self, turn, state: _State) -> dict:
        """All values of the second half that are there before its layer loop."""
        num_consts, num_carry = scan_counts(self.halves.eqn)
        carried = open_jaxpr(self.halves.eqn.params["jaxpr"]).invars[num_consts : num_consts + num_carry]
        made = dict(zip((*carried, *self.halves.handed), (*state.carry, *state.handed), strict=True))
        return compute(self.halves.before, self._given(turn) | made)

    def _finished(self, turn, known: dict, outs: Sequence) -> tuple[list, list]:
        """What is carried on, and the stacked outputs with this microbatch's."""
        known = compute(self.halves.after, known)
        results = [jnp.asarray(read(atom, known)) for atom in open_jaxpr(self.halves.eqn.params["jaxpr"]).outvars]
        num_carry = len(results) - len(outs)
        return results[:num_carry], [
            lax.dynamic_update_index_in_dim(whole, one, self._place(turn), 0)
            for whole, one in zip(outs, results[num_carry:], strict=True)
        ]

    def _place(self, turn):
        params = self.halves.eqn.params
        return params["length"] - 1 - turn if params["reverse"] else turn


def _side_by_side(loops: Sequence[tuple[Any, list]]) -> list[list]:
    """The results of pipelined loops on their operands, run as one; iterations that only longer ones have go ahead."""
    trips = min(eqn.params["length"] for eqn, _ in loops)
    steps, starts = [], []
    for eqn, operands in loops:
        consts, carry, _ = split_operands(eqn, operands)
        step = partial(_iteration, eqn, consts)
        for _ in range(eqn.params["length"] - trips):
            carry = step(carry)
        steps.append(step)
        starts.append(carry)

    def body(carries, _):
        return [step(carry) for step, carry in zip(steps, carries, strict=True)], None

    return lax.scan(body, starts, length=trips)[0]


def _iteration(eqn, consts: list, carry: list) -> list:
    with provenance(eqn):
        return eval_local(eqn.params["jaxpr"], [*consts, *carry])
