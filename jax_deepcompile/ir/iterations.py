"""Loops run an iteration at a time: what a ``scan`` reads and writes in turn, and loops that XLA cannot count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_deepcompile.ir.primitives import Scan


@dataclass(frozen=True)
class Iterations:
    """The iterations of a ``scan`` on its operands, in the order of their turns.

    Attributes:
      eqn: the scan.
      consts: what every iteration reads.
      carry: what the first one is handed.
      stacks: what each reads a slice of.
    """

    eqn: Any
    consts: list
    carry: list
    stacks: list

    @classmethod
    def of(cls, eqn, operands: list) -> Iterations:
        return cls(eqn, *Scan(eqn).split(operands))

    @property
    def length(self) -> int:
        return Scan(self.eqn).length

    def slices(self, turn) -> list:
        """What the iteration whose turn it is reads of the stacks."""
        place = self._place(turn)
        return [lax.dynamic_index_in_dim(stack, place, keepdims=False) for stack in self.stacks]

    def outputs(self) -> list:
        """The stacked outputs before the first iteration."""
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self.eqn.outvars[len(self.carry) :]]

    def written(self, outputs: Sequence, turn, made: Sequence) -> list:
        """The stacked outputs with what the iteration whose turn it is made."""
        place = self._place(turn)
        return [lax.dynamic_update_index_in_dim(whole, one, place, 0) for whole, one in zip(outputs, made, strict=True)]

    def _place(self, turn):
        return self.length - 1 - turn if Scan(self.eqn).reverse else turn


def run_with_hidden_trip_count(trips: int, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """The state after ``body(trip, state) -> state`` ran ``trips`` times, from 0 on; XLA does not see how often."""
    bound = lax.optimization_barrier(jnp.int32(trips))

    def step(counted):
        trip, state = counted
        return trip + 1, body(trip, state)

    return lax.while_loop(lambda counted: counted[0] < bound, step, (jnp.int32(0), start))[1]
