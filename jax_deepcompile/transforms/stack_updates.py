"""The elementwise update of stacks, some of which are in the host's memory, a layer at a time.

Before, with ``m`` and ``n`` on the host::

    m' = f(m, g); p' = h(p, m')
    n' = f(n, k); q' = h(q, n')

After::

    loop(t, a = to_device(m[0])):
        e = f(a, g[t]); p[t] = h(p[t], e); m[t] = to_host(e); b = to_device(n[t])
        e = f(b, k[t]); q[t] = h(q[t], e); n[t] = to_host(e); a = to_device(m[t + 1])

What one update needs comes in while what the one before made goes out, so copies run both ways at once. Where there is
one alone nothing comes in meanwhile: to read its next layer before this one is written, XLA would copy the stack.

What is no stack, and larger than a layer, is cut into as many pieces as the stacks have layers, if its rows can be
divided by that: whole, the device would hold all of it, twice.

Guarantees: values are bitwise the same; stacks are updated in place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax

from jax_deepcompile.analysis.dataflow import needed_for, variables
from jax_deepcompile.ir.memory import DEVICE, HOST, is_on_host, size_bytes
from jax_deepcompile.ir.primitives import ELEMENTWISE
from jax_deepcompile.ir.retrace import compute
from jax_deepcompile.ir.traversal import free_variables


@dataclass(frozen=True)
class StackUpdate:
    """The update of stacks of one shape.

    Attributes:
      leaves: of the state, on the host.
      eqns: of the update, and cheap ones before it, so that no stack is there that only this reads.
      made: by position the results of the program that it makes.
      away: positions of those that go to the host.
      turns: in which it is made, each of as many rows: of a stack one layer.
    """

    leaves: tuple
    eqns: tuple
    made: Mapping[int, Any]
    away: tuple[int, ...]
    turns: int

    @classmethod
    def of(
        cls,
        jaxpr: Any,
        leaves: Sequence,
        eqns: Sequence,
        away: Sequence[int],
        state: Collection[int],
        turns: int | None = None,
    ) -> StackUpdate | None:
        """None where it cannot be: for what is not elementwise, on stacks of one shape and scalars, each a result once;
        and for what has too few bytes for so many ``turns``, or cannot be divided by them.

        Args:
          eqns: that read one of ``leaves``, or what is made of them.
          state: positions of the results that take the memory of what they succeed. Those that the update reads are
            made here, too: elsewhere they would be written while this still reads what they succeed, in a copy.
          turns: None for one a row.
        """
        shape = leaves[0].aval.shape
        if not away or len(shape) < 2:
            return None
        turns = shape[0] if turns is None else turns
        if shape[0] % turns or size_bytes(leaves[0]) < turns * _LAYER_BYTES:
            return None
        elementwise = [eqn for eqn in jaxpr.eqns if is_elementwise(eqn, shape) and eqn.outvars[0].aval.shape == shape]
        results = {var for eqn in eqns for var in eqn.outvars}
        outputs = {place: atom for place, atom in enumerate(jaxpr.outvars) if variables([atom])}
        made = {place: atom for place, atom in outputs.items() if atom in results}
        others = [leaf for leaf in leaves if leaf.aval.shape != shape]
        if others or not set(away) <= made.keys() or len(set(made.values())) != len(made):
            return None
        if not results <= {var for eqn in elementwise for var in eqn.outvars}:
            return None
        eqns = tuple(needed_for(elementwise, results, effects=False))
        count, before = Counter(outputs.values()), {eqn.outvars[0] for eqn in eqns} - results
        made |= {
            place: outputs[place] for place in state if outputs.get(place) in before and count[outputs[place]] == 1
        }
        return cls(tuple(leaves), eqns, made, tuple(away), turns)

    @property
    def rows(self) -> int:
        """That a turn updates."""
        return self.leaves[0].aval.shape[0] // self.turns

    @property
    def turn_bytes(self) -> int:
        """That a turn copies each way."""
        return sum(map(size_bytes, self.leaves)) // self.turns

    @cached_property
    def reads(self) -> list:
        return free_variables(self.eqns, self.made.values())


def is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Whether ``eqn`` makes an array of ``shape``, or a scalar, of such ones alone, element by element."""
    name = eqn.primitive.name
    shapes = {atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)}
    return name in ELEMENTWISE and name != "reshape" and shapes <= {shape, ()}


_LAYER_BYTES = 1 << 20
"""What is less is not worth a turn of a loop."""


def together(updates: Sequence[StackUpdate]) -> list[list[StackUpdate]]:
    """The ``updates`` that one loop runs: of as many turns, those of about as many bytes beside one another."""
    found = defaultdict[int, list[StackUpdate]](list)
    for each in sorted(updates, key=lambda each: each.turn_bytes):
        found[each.turns].append(each)
    return list(found.values())


def run(updates: Sequence[StackUpdate], known: Mapping[Any, Any], donors: Mapping[int, Any]) -> dict[int, Any]:
    """The results of all by position, in the memory of their donors where they have one.

    Args:
      updates: of as many turns.
      known: what they read.
      donors: variables whose memory results take, by the results' positions.
    """
    turns, several = updates[0].turns, [_Running(each, known, donors) for each in updates]

    def turn(t: Any, carry: tuple[list, list]) -> tuple[list, list]:
        stacks, coming = carry
        for at, each in enumerate(several):
            coming = coming or each.fetched(stacks[at], t)
            stacks[at] = each.updated(stacks[at], coming, t)
            after = (at + 1) % len(several)
            next_turn = t if after else lax.min(t + 1, turns - 1)
            coming = several[after].fetched(stacks[after], next_turn) if len(several) > 1 else []
        return stacks, coming

    starts = [each.starts for each in several]
    first = several[0].fetched(starts[0], 0) if len(several) > 1 else []
    stacks, _ = lax.fori_loop(0, turns, turn, (starts, first))
    return {
        place: stack
        for each, made in zip(updates, stacks, strict=True)
        for place, stack in zip(each.made, made, strict=True)
    }


@dataclass(frozen=True)
class _Running:
    """An update in a loop; its ``stacks`` there are those of its results, in order."""

    update: StackUpdate
    known: Mapping[Any, Any]
    donors: Mapping[int, Any]

    @cached_property
    def starts(self) -> list:
        return [
            self.known[self.donors[place]] if place in self.donors else lax.empty(var.aval.shape, var.aval.dtype)
            for place, var in self.update.made.items()
        ]

    @cached_property
    def _donated(self) -> dict[Any, int]:
        return {self.donors[place]: number for number, place in enumerate(self.update.made) if place in self.donors}

    @cached_property
    def _coming(self) -> list:
        """What it reads that is on the host."""
        return [var for var in self.update.reads if is_on_host(self.known[var])]

    def _cut(self, var: Any, stacks: Sequence, t: Any) -> Any:
        stack = stacks[self._donated[var]] if var in self._donated else self.known[var]
        return lax.dynamic_slice_in_dim(stack, self._row(t), self.update.rows) if var.aval.shape else stack

    def _row(self, t: Any) -> Any:
        return t if self.update.rows == 1 else t * self.update.rows

    def fetched(self, stacks: Sequence, t: Any) -> list:
        """What turn ``t`` needs that is on the host."""
        return [jax.device_put(self._cut(var, stacks, t), DEVICE) for var in self._coming]

    def updated(self, stacks: Sequence, coming: Sequence, t: Any) -> list:
        """The ``stacks`` after turn ``t``, of which what is on the host is ``coming``."""
        here = dict(zip(self._coming, coming, strict=True))
        here |= {var: self._cut(var, stacks, t) for var in self.update.reads if var not in here}
        made = compute(self.update.eqns, here)
        return [
            lax.dynamic_update_slice_in_dim(
                stack, jax.device_put(made[var], HOST) if place in self.update.away else made[var], self._row(t), 0
            )
            for stack, (place, var) in zip(stacks, self.update.made.items(), strict=True)
        ]
