"""What is computed again: in one place, or by a loop after an earlier one had computed it for the same layer.

Equal work on equal operands makes equal values; barriers, which keep XLA from seeing this, change none. Two loops over
the same stacks run a layer at a time: of layer ``t`` both bodies read the same slices and the same constants, and what
the first writes into a stack, the second reads of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, has_side_effects, open_jaxpr, scan_counts
from jax_deepcompile.analysis.dataflow import literal_bits, reached_from, variables
from jax_deepcompile.analysis.gathers import CHEAP, size_bytes
from jax_deepcompile.analysis.work import VIEWS, fused_away
from jax_deepcompile.ir.traversal import nested_jaxprs


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


def recomputed_activations(scope: Any, forward: Any, backward: Any) -> tuple[Activation, ...]:
    """What ``backward`` computes, and writes to memory, of every layer although ``forward`` has; in program order.

    Args:
      scope: the jaxpr that both are equations of.
      forward: a scan.
      backward: a later scan, as long as the first.
    """
    if forward.params["length"] != backward.params["length"]:
        return ()
    numbers = _Numbers()
    around = numbers.of_scope(scope)
    ahead, again = numbers.of_loop(forward, around), numbers.of_loop(backward, around)
    body, later = open_jaxpr(forward.params["jaxpr"]), open_jaxpr(backward.params["jaxpr"])
    num_consts, num_carry = scan_counts(forward)
    carried = reached_from(body.eqns, set(body.invars[num_consts : num_consts + num_carry]))
    first = {number: var for var, number in reversed(ahead.items()) if var in carried}
    return _activations(later, again, first)


def repeated_activations(jaxpr: Any) -> tuple[Activation, ...]:
    """What ``jaxpr`` computes, and writes to memory, although it has before a barrier; in program order.

    Without what is made of a single input by cheap work, as a gathered parameter is.
    """
    flat = open_jaxpr(jaxpr)
    numbers, derived = _Numbers().of_scope(flat), _derived(flat)
    first: dict[int, Any] = {}
    for eqn in flat.eqns:
        for var in eqn.outvars:
            first.setdefault(numbers[var], var)
    merged = _Numbers(sees_through_barriers=False).of_scope(flat)
    again = {var: number for var, number in numbers.items() if first.get(number) is not var and var not in derived}
    again = {var: number for var, number in again.items() if number in first and merged[var] != merged[first[number]]}
    return _activations(flat, again, first)


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


_DIFFERENT = ("rng_uniform", "empty", "empty2")
"""Primitives that make another value every time."""


@dataclass
class _Numbers:
    """A number for every value, the same for values that are surely equal.

    Attributes:
      known: numbers by what makes a value.
      sees_through_barriers: whether what a barrier returns is what it was given; it is not to XLA.
    """

    known: dict[Any, int] = field(default_factory=dict)
    sees_through_barriers: bool = True

    def of_scope(self, jaxpr: Any) -> dict[Any, int]:
        """The numbers of the variables of the jaxpr that loops are in."""
        flat = open_jaxpr(jaxpr)
        numbers = {var: self._new() for var in (*flat.constvars, *flat.invars)}
        return self._of_equations(flat.eqns, numbers)

    def of_loop(self, eqn: Any, around: dict[Any, int]) -> dict[Any, int]:
        """The numbers of the variables of a scan's body, for any one layer; and notes what its stacks hold."""
        body, closed = open_jaxpr(eqn.params["jaxpr"]), closed_consts(eqn.params["jaxpr"])
        num_consts, num_carry = scan_counts(eqn)
        operands = [self._operand(atom, around) for atom in eqn.invars]
        numbers = {var: self._of("constant", id(value)) for var, value in zip(body.constvars, closed, strict=True)}
        numbers |= dict(zip(body.invars[:num_consts], operands[:num_consts], strict=True))
        for var, stack in zip(body.invars[num_consts:], operands[num_consts:], strict=True):
            carried = var in body.invars[num_consts : num_consts + num_carry]
            numbers[var] = self._new() if carried else self._of("layer", stack)
        numbers = self._of_equations(body.eqns, numbers)
        for stack, atom in zip(eqn.outvars[num_carry:], body.outvars[num_carry:], strict=True):
            self.known["layer", around[stack]] = self._operand(atom, numbers)
        return numbers

    def _of_equations(self, eqns: Sequence, numbers: dict[Any, int]) -> dict[Any, int]:
        for eqn in eqns:
            operands = [self._operand(atom, numbers) for atom in eqn.invars]
            is_barrier = eqn.primitive.name == "optimization_barrier"
            if is_barrier and self.sees_through_barriers:
                numbers.update(zip(eqn.outvars, operands, strict=True))
            elif is_barrier or has_side_effects(eqn) or eqn.primitive.name in _DIFFERENT:
                numbers.update({var: self._new() for var in eqn.outvars})
            else:
                made = (eqn.primitive.name, *_params(eqn), *operands)
                numbers.update({var: self._of(*made, place) for place, var in enumerate(eqn.outvars)})
        return numbers

    def _operand(self, atom: Any, numbers: dict[Any, int]) -> int:
        return self._of("literal", literal_bits(atom)) if isinstance(atom, jex.Literal) else numbers[atom]

    def _of(self, *key: Any) -> int:
        return self.known.setdefault(key, len(self.known))

    def _new(self) -> int:
        return self._of("new", len(self.known))


def _params(eqn: Any) -> Iterator[Any]:
    """What tells one use of a primitive from another; constants of jaxprs are the same if they are one object."""
    for name, value in sorted(eqn.params.items()):
        yield name
        yield (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else str(value)
    for jaxpr in nested_jaxprs(eqn):
        yield tuple(map(id, closed_consts(jaxpr)))
        for inner in open_jaxpr(jaxpr).eqns:
            yield tuple(map(literal_bits, inner.invars))
            yield from _params(inner)
