"""What is computed again: in one place, or by a loop after an earlier one had computed it for the same layer.

Equal work on equal operands makes equal values; barriers, which keep XLA from seeing this, change none. Two loops over
the same stacks run a layer at a time: of layer ``t`` both bodies read the same slices and the same constants, and what
the first writes into a stack, the second reads of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.equal_work import Numbers
from jax_deepcompile.analysis.gathers import derived
from jax_deepcompile.analysis.leading import collectives_along_leading_dimension, scan_along_leading_dimension
from jax_deepcompile.analysis.work import fused_away
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.primitives import PRODUCTS, VIEWS, Scan
from jax_deepcompile.ir.traversal import reached_from


@dataclass(frozen=True)
class Activation:
    """One value that is computed twice, that of one layer where two loops do.

    Attributes:
      first: the variable that has it first.
      again: those that have it again, of the second loop's body.
      size_bytes: of the value.
    """

    first: Any
    again: tuple
    size_bytes: int


@dataclass(frozen=True)
class SharedLayers:
    """What two loops in the same place compute of the same layers; collectives of both bodies are along dimension 0."""

    forward: Any
    backward: Any
    activations: tuple[Activation, ...]


class Place:
    """A jaxpr with the scans that are equations of it."""

    def __init__(self, jaxpr: Any) -> None:
        self._flat = open_jaxpr(jaxpr)
        self._numbers = Numbers()
        self._values = self._numbers.of_place(collectives_along_leading_dimension(self._flat))
        self._loops: dict[int, tuple[Scan, dict[Any, int]]] = {}
        for eqn in self._flat.eqns:
            if eqn.primitive.name == "scan":
                leading = Scan(scan_along_leading_dimension(eqn))
                self._loops[id(eqn)] = leading, self._numbers.of_loop(leading, self._values)

    def shared(self, forward: Any, backward: Any) -> SharedLayers:
        """What ``backward`` computes, and writes to memory, of every layer although ``forward`` has.

        Without what is made of parameters alone. Nothing is shared by loops that are not as long as each other.
        """
        (ahead, made), (again, later) = self._loops[id(forward)], self._loops[id(backward)]
        body, rest = ahead.body, again.body
        if ahead.length != again.length:
            return SharedLayers(body, rest, ())
        activations = _activations_of(ahead)
        first = {number: var for var, number in reversed(made.items()) if var in activations}
        return SharedLayers(body, rest, _activations(rest, later, first))

    def repeated(self) -> tuple[Activation, ...]:
        """What the jaxpr itself computes, and writes to memory, although it has before a barrier; in program order.

        Without what is made of a single input by cheap work, as a gathered parameter is.
        """
        first: dict[int, Any] = {}
        for eqn in self._flat.eqns:
            for var in eqn.outvars:
                first.setdefault(self._values[var], var)
        cheap = derived(self._flat, dict.fromkeys(self._flat.invars))
        again = {var: number for var, number in self._values.items() if var not in cheap and number in first}
        again = {var: number for var, number in again.items() if first[number] is not var}
        if not again:
            return ()
        merged = Numbers(sees_through_barriers=False).of_place(self._flat)
        again = {var: number for var, number in again.items() if merged[var] != merged[first[number]]}
        return _activations(self._flat, again, first)


def _activations_of(loop: Scan) -> set:
    """What the loop's body makes of activations: of the carry or, where no product reads that, of chunks in stacks."""
    carried = reached_from(loop.body.eqns, loop.inputs.carry)
    if any(eqn.primitive.name in PRODUCTS and not carried.isdisjoint(eqn.outvars) for eqn in loop.body.eqns):
        return carried
    stacks = loop.inputs.xs
    return carried | (reached_from(loop.body.eqns, stacks) - derived(loop.body, dict.fromkeys(stacks)).keys())


def _activations(jaxpr: jex.Jaxpr, again: Mapping[Any, int], first: Mapping[int, Any]) -> tuple[Activation, ...]:
    """What ``jaxpr`` has ``again``, by number, of what it, or another one, had ``first``."""
    found: dict[int, list] = {}
    fused = fused_away(jaxpr)
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            if again.get(var) in first and var not in fused and eqn.primitive.name not in VIEWS:
                found.setdefault(again[var], []).append(var)
    return tuple(Activation(first[number], tuple(same), size_bytes(same[0])) for number, same in found.items())
