"""How the loops around pipelined ones run: their trip counts hidden from XLA, forward beside backward where that helps.

XLA doubles the body of every loop that it can count (``xla_gpu_enable_while_loop_double_buffering``): what layer loops
carry then changes buffers without a copy. Around them it would double the whole program, and its memory.

Before::

    scan[length=16]: ...

After::

    n = optimization_barrier 16
    while i < n: ...

Gathers make forward wait for the network where backward, which gathers as much and computes twice or three times as
much, does not; side by side, layer by layer, one's compute hides the other's communication.

Before, with both layer loops pipelined::

    scan(k): r = scan(t): forward(x[k]); p = head(r); s = s + scan(t): backward(p, r)

After::

    r = scan(t): forward(x[0])
    while k < n - 1: p = head(r); r, s = scan(t): forward(x[k + 1]), s + backward(p, r)
    p = head(r); s = s + scan(t): backward(p, r)

Guarantees: values are bitwise the same. Overlapped, every layer is gathered and reduced exactly as often as before,
parameters that the loop over microbatches keeps gathered once for all three parts; what forward saves for backward is
in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_deepcompile._jax_compat import eval_local, has_side_effects, provenance
from jax_deepcompile.analysis.dataflow import needed_for, slim_barriers, variables
from jax_deepcompile.analysis.loops import Loop, constants_of, find_loops, reduces_gradients
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import COLLECTIVES, Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, compute, read
from jax_deepcompile.ir.traversal import contains, free_variables, reached_from
from jax_deepcompile.transforms.decision import Decision, loop_named, refused, replace_loops

_MOST_PEELED = 2
"""Iterations by which the two layer loops may differ."""


@dataclass(frozen=True)
class MicrobatchLoop(Decision, kind="microbatch_loops", about=("loop",)):
    """How one loop around others runs.

    Attributes:
      overlap: whether the next iteration's forward pass runs beside this one's backward pass.
    """

    loop: str
    overlap: bool = False

    def check(self, program: Program) -> None:
        loop = loop_named(program, self.loop, "says how to run")
        if not any(other.is_inside(loop) for other in find_loops(program)):
            raise refused(f"it says how to run {self.loop!r}, which has no loops in it")

    def describe(self) -> str:
        how = "forward of the next iteration beside backward" if self.overlap else "XLA does not see its trip count"
        return f"{self.loop}: {how}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[MicrobatchLoop]) -> Program:
        ways = {each.loop: overlapped if each.overlap else hidden_trip_count for each in decisions}
        return replace_loops(program, mesh, ways)


@dataclass(frozen=True)
class _Iterations:
    """The iterations of a ``scan`` on its operands, in order."""

    eqn: Any
    consts: list
    carry: list
    stacks: list

    @classmethod
    def of(cls, eqn, operands: list) -> _Iterations:
        return cls(eqn, *Scan(eqn).split(operands))

    @property
    def length(self) -> int:
        return Scan(self.eqn).length

    def slices(self, index) -> list:
        """What iteration ``index`` reads of the stacks."""
        place = self._place(index)
        return [lax.dynamic_index_in_dim(stack, place, keepdims=False) for stack in self.stacks]

    def outputs(self) -> list:
        """The stacked outputs before the first iteration."""
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self.eqn.outvars[len(self.carry) :]]

    def written(self, outputs: Sequence, index, made: Sequence) -> list:
        """The stacked outputs with what iteration ``index`` made."""
        place = self._place(index)
        return [lax.dynamic_update_index_in_dim(whole, one, place, 0) for whole, one in zip(outputs, made, strict=True)]

    def _place(self, index):
        return self.length - 1 - index if Scan(self.eqn).reverse else index


def _run_uncounted(trips: int, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """The state after ``body(trip, state) -> state`` ran ``trips`` times, from 0 on; XLA does not see how often."""
    bound = lax.optimization_barrier(jnp.int32(trips))

    def step(counted):
        trip, state = counted
        return trip + 1, body(trip, state)

    return lax.while_loop(lambda counted: counted[0] < bound, step, (jnp.int32(0), start))[1]


def hidden_trip_count(_: Loop) -> Compute:
    """The way to run a ``scan`` as a loop of unknown length."""

    def run(eqn, operands: list) -> list:
        loop = _Iterations.of(eqn, operands)

        def body(index, state):
            carry, outputs = state
            results = eval_local(Scan(eqn).closed, [*loop.consts, *carry, *loop.slices(index)])
            carry, made = Scan(eqn).split_results(results)
            return carry, loop.written(outputs, index, made)

        carry, outputs = _run_uncounted(loop.length, body, (loop.carry, loop.outputs()))
        return [*carry, *outputs]

    return run


@dataclass(frozen=True)
class Halves:
    """One iteration of a loop over microbatches in two halves, of which the first can run an iteration ahead.

    Attributes:
      eqn: the loop over microbatches, a ``scan``.
      forward: the layer loop of the first half, the last equation of ``ahead``.
      backward: the layer loop of the second half that it runs beside.
      ahead: the first half: equations that need nothing of earlier microbatches.
      rest: the second half, ``backward`` among them; what is alike for all microbatches it computes again, except for
        collectives.
      saved: what the second half needs of the first.
    """

    eqn: Any
    forward: Any
    backward: Any
    ahead: Sequence
    rest: Sequence
    saved: Sequence

    @property
    def saved_bytes(self) -> int:
        """What is in memory twice."""
        return sum(map(size_bytes, self.saved))

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

    Only the second of a pair reduces gradients. Of several pairs the longest, nearest to each other.
    """
    body = Scan(eqn).body
    if Scan(eqn).length < 2 or any(map(has_side_effects, body.eqns)):
        return None
    loops = [inner for inner in body.eqns if _is_carried(inner)]
    found = [
        halves
        for place, backward in enumerate(loops)
        for forward in loops[:place][::-1]
        if reduces_gradients(backward) and not reduces_gradients(forward)
        if abs(Scan(forward).length - Scan(backward).length) <= _MOST_PEELED
        if (halves := _halves(eqn, body, forward, backward)) is not None
    ]
    return max(found, key=lambda halves: Scan(halves.backward).length, default=None)


def _is_carried(eqn) -> bool:
    """Whether ``eqn`` is a loop that reads and writes stacks by index, as pipelined ones do."""
    return eqn.primitive.name == "scan" and not Scan(eqn).operands.xs and not Scan(eqn).results.ys


def _halves(eqn, body, forward, backward) -> Halves | None:
    if reached_from(body.eqns, forward.outvars).isdisjoint(variables(backward.invars)):
        return None
    ahead = slim_barriers(needed_for(body.eqns, forward.outvars), forward.outvars)
    if not set(Scan(eqn).inputs.carry).isdisjoint(free_variables(ahead, forward.outvars)):
        return None
    own = reached_from(body.eqns, Scan(eqn).inputs.xs)
    made = {var for other in ahead for var in other.outvars if var in own or contains(other, COLLECTIVES)}
    made |= set(forward.outvars)
    rest = needed_for([other for other in body.eqns if not made.issuperset(other.outvars)], body.outvars)
    saved = [var for var in free_variables(rest, body.outvars) if var in made]
    return Halves(eqn, forward, backward, ahead, rest, saved)


def overlapped(loop: Loop) -> Compute:
    """The way to run a loop over microbatches that has halves with each first half an iteration ahead."""
    halves = find_halves(loop.eqn)
    if halves is None:
        raise refused(f"it overlaps the iterations of {loop.name}, which has no two layer loops to run side by side")
    return lambda eqn, operands: _Microbatches(halves, _Iterations.of(eqn, operands)).run()


class _State(NamedTuple):
    """What flows from one microbatch to the next."""

    carry: Sequence
    saved: Sequence
    outputs: Sequence


@dataclass(frozen=True)
class _Microbatches:
    """The halves of a loop's iterations."""

    halves: Halves
    loop: _Iterations

    def run(self) -> list:
        halves, last = self.halves, self.loop.length - 1
        first = compute(halves.ahead, self._given(0))
        state = _State(self.loop.carry, [first[var] for var in halves.saved], self.loop.outputs())
        state = _run_uncounted(last, self._trip, state)
        known = compute([halves.backward], self._until_backward(last, state))
        carry, outputs = self._finished(last, known, state.outputs)
        return [*carry, *outputs]

    def _trip(self, index, state: _State) -> _State:
        """The second half of one microbatch, the first of the next, and their layer loops as one."""
        forward, backward = self.halves.forward, self.halves.backward
        mine, coming = self._until_backward(index, state), compute(self.halves.ahead[:-1], self._given(index + 1))
        made, reduced = _side_by_side([(forward, _operands(forward, coming)), (backward, _operands(backward, mine))])
        coming |= dict(zip(forward.outvars, made, strict=True))
        mine |= dict(zip(backward.outvars, reduced, strict=True))
        carry, outputs = self._finished(index, mine, state.outputs)
        return _State(carry, [coming[var] for var in self.halves.saved], outputs)

    def _given(self, index) -> dict:
        """What all microbatches read, and what microbatch ``index`` reads."""
        loop, inputs = self.loop, Scan(self.loop.eqn).inputs
        values = (*loop.consts, *loop.slices(index))
        return constants_of(loop.eqn) | dict(zip((*inputs.consts, *inputs.xs), values, strict=True))

    def _until_backward(self, index, state: _State) -> dict:
        """All values of the second half that are there before its layer loop."""
        carried = Scan(self.loop.eqn).inputs.carry
        made = dict(zip((*carried, *self.halves.saved), (*state.carry, *state.saved), strict=True))
        return compute(self.halves.before, self._given(index) | made)

    def _finished(self, index, known: dict, outputs: Sequence) -> tuple[list, list]:
        """What is carried on, and the stacked outputs with this microbatch's."""
        known = compute(self.halves.after, known)
        scan = Scan(self.loop.eqn)
        carry, slices = scan.split_results(jnp.asarray(read(atom, known)) for atom in scan.body.outvars)
        return carry, self.loop.written(outputs, index, slices)


def _operands(eqn, known: dict) -> list:
    return [read(atom, known) for atom in eqn.invars]


def _side_by_side(loops: Sequence[tuple[Any, list]]) -> list[list]:
    """The results of pipelined loops on their operands, run as one; iterations that only longer ones have go ahead."""
    trips = min(Scan(eqn).length for eqn, _ in loops)
    steps, starts = [], []
    for eqn, operands in loops:
        consts, carry, _ = Scan(eqn).split(operands)
        step = partial(_iteration, eqn, consts)
        for _ in range(Scan(eqn).length - trips):
            carry = step(carry)
        steps.append(step)
        starts.append(carry)

    def body(carries, _):
        return [step(carry) for step, carry in zip(steps, carries, strict=True)], None

    return lax.scan(body, starts, length=trips)[0]


def _iteration(eqn, consts: list, carry: list) -> list:
    with provenance(eqn):
        return eval_local(Scan(eqn).closed, [*consts, *carry])
