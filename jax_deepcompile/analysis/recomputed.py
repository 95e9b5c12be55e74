"""What is computed again: in one place, or by a loop after an earlier one had computed it for the same layer.

Equal work on equal operands makes equal values; barriers, which keep XLA from seeing this, change none. Two loops over
the same stacks run a layer at a time: of layer ``t`` both bodies read the same slices and the same constants, and what
the first writes into a stack, the second reads of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, open_jaxpr
from jax_deepcompile.analysis.dataflow import literal_bits, reached_from, variables
from jax_deepcompile.analysis.equal_work import is_repeatable, work_key
from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.analysis.leading import scan_along_leading_dimension
from jax_deepcompile.analysis.work import fused_away
from jax_deepcompile.ir.primitives import CHEAP, VIEWS, Scan


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
    """What two loops in the same place compute of the same layers.

    Attributes:
      forward: the body of the first, its collectives along the leading dimension.
      backward: the body of the second, likewise.
      activations: what both compute, in program order.
    """

    forward: Any
    backward: Any
    activations: tuple[Activation, ...]


class Place:
    """A jaxpr with the scans that are equations of it."""

    def __init__(self, jaxpr: Any) -> None:
        self._flat = open_jaxpr(jaxpr)
        self._numbers = _Numbers()
        self._values = self._numbers.of_place(self._flat)
        self._loops: dict[int, tuple[Scan, dict[Any, int]]] = {}
        for eqn in self._flat.eqns:
            if eqn.primitive.name == "scan":
                leading = Scan(scan_along_leading_dimension(eqn))
                self._loops[id(eqn)] = leading, self._numbers.of_loop(leading, self._values)

    def shared(self, forward: Any, backward: Any) -> SharedLayers:
        """What ``backward`` computes, and writes to memory, of every layer although ``forward`` has.

        Without what is made of parameters alone. Nothing is shared by loops that are not as long as each other.

        Args:
          forward: one of the scans.
          backward: a later one.
        """
        (ahead, made), (again, later) = self._loops[id(forward)], self._loops[id(backward)]
        body, rest = ahead.body, again.body
        if ahead.length != again.length:
            return SharedLayers(body, rest, ())
        carried = reached_from(body.eqns, ahead.inputs.carry)
        first = {number: var for var, number in reversed(made.items()) if var in carried}
        return SharedLayers(body, rest, _activations(rest, later, first))

    def repeated(self) -> tuple[Activation, ...]:
        """What the jaxpr itself computes, and writes to memory, although it has before a barrier; in program order.

        Without what is made of a single input by cheap work, as a gathered parameter is.
        """
        first: dict[int, Any] = {}
        for eqn in self._flat.eqns:
            for var in eqn.outvars:
                first.setdefault(self._values[var], var)
        derived = _derived(self._flat)
        again = {var: number for var, number in self._values.items() if var not in derived and number in first}
        again = {var: number for var, number in again.items() if first[number] is not var}
        if not again:
            return ()
        merged = _Numbers(sees_through_barriers=False).of_place(self._flat)
        again = {var: number for var, number in again.items() if merged[var] != merged[first[number]]}
        return _activations(self._flat, again, first)


def _activations(jaxpr: jex.Jaxpr, again: Mapping[Any, int], first: Mapping[int, Any]) -> tuple[Activation, ...]:
    """What ``jaxpr`` has ``again``, by number, of what it, or another one, had ``first``."""
    found: dict[int, list] = {}
    fused = fused_away(jaxpr)
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            if again.get(var) in first and var not in fused and eqn.primitive.name not in VIEWS:
                found.setdefault(again[var], []).append(var)
    return tuple(Activation(first[number], tuple(same), size_bytes(same[0])) for number, same in found.items())


def _derived(jaxpr: jex.Jaxpr) -> set:
    """Variables made by cheap work of one input alone."""
    derived = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            pairs = zip(eqn.outvars, eqn.invars, strict=True)
            derived.update(var for var, atom in pairs if isinstance(atom, jex.Var) and atom in derived)
        elif eqn.primitive.name in CHEAP:
            operands = variables(eqn.invars)
            derived.update(eqn.outvars if len(operands) == 1 and operands[0] in derived else ())
    return derived


@dataclass
class _Numbers:
    """A number for every value, the same for values that are surely equal.

    Attributes:
      sees_through_barriers: whether what a barrier returns is what it was given; it is not to XLA.
      known: numbers by what makes a value.
    """

    sees_through_barriers: bool = True
    known: dict[Hashable, int] = field(init=False, default_factory=dict)

    def of_place(self, jaxpr: jex.Jaxpr) -> dict[Any, int]:
        """The numbers of the variables of the jaxpr that loops are in."""
        numbers = {var: self._new() for var in (*jaxpr.constvars, *jaxpr.invars)}
        return self._of_equations(jaxpr.eqns, numbers)

    def of_loop(self, scan: Scan, around: dict[Any, int]) -> dict[Any, int]:
        """The numbers of the variables of a scan's body, for any one layer; and notes what its stacks hold."""
        body, inputs, constants = scan.body, scan.inputs, closed_consts(scan.closed)
        consts, _, stacks = scan.split(self._operand(atom, around) for atom in scan.eqn.invars)
        numbers = {var: self._of("constant", id(value)) for var, value in zip(body.constvars, constants, strict=True)}
        numbers |= dict(zip(inputs.consts, consts, strict=True))
        numbers |= {var: self._new() for var in inputs.carry}
        numbers |= {var: self._of("layer", stack) for var, stack in zip(inputs.xs, stacks, strict=True)}
        numbers = self._of_equations(body.eqns, numbers)
        for stack, atom in zip(scan.results.ys, scan.outputs.ys, strict=True):
            self.known["layer", around[stack]] = self._operand(atom, numbers)
        return numbers

    def _of_equations(self, eqns: Sequence, numbers: dict[Any, int]) -> dict[Any, int]:
        for eqn in eqns:
            operands = tuple(self._operand(atom, numbers) for atom in eqn.invars)
            is_barrier = eqn.primitive.name == "optimization_barrier"
            if is_barrier and self.sees_through_barriers:
                numbers.update(zip(eqn.outvars, operands, strict=True))
            elif is_barrier or not is_repeatable(eqn):
                numbers.update({var: self._new() for var in eqn.outvars})
            else:
                made = work_key(eqn), operands
                numbers.update({var: self._of(made, place) for place, var in enumerate(eqn.outvars)})
        return numbers

    def _operand(self, atom: Any, numbers: dict[Any, int]) -> int:
        return self._of("literal", literal_bits(atom)) if isinstance(atom, jex.Literal) else numbers[atom]

    def _of(self, *key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))

    def _new(self) -> int:
        return self._of("new", len(self.known))
