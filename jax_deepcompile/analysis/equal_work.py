"""What tells one equation's work from another's: equal keys mean that equal operands give equal results."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core as jex

from jax_deepcompile._jax_compat import closed_consts, has_side_effects, open_jaxpr, trace_context
from jax_deepcompile.analysis.dataflow import literal_bits
from jax_deepcompile.ir.primitives import UNREPEATABLE, Scan
from jax_deepcompile.ir.traversal import contains


@dataclass
class Numbers:
    """A number for every value, the same for values that are surely equal.

    Attributes:
      sees_through_barriers: whether what a barrier returns is what it was given; it is not to XLA.
    """

    sees_through_barriers: bool = True
    known: dict[Hashable, int] = field(init=False, default_factory=dict)

    def of_place(self, jaxpr: jex.Jaxpr, given: Mapping[Any, int] | None = None) -> dict[Any, int]:
        """The numbers of all variables of ``jaxpr``, some of its inputs having those ``given``."""
        numbers = {var: self._of("new", len(self.known)) for var in (*jaxpr.constvars, *jaxpr.invars)}
        numbers |= given or {}
        for eqn in jaxpr.eqns:
            operands = tuple(self.of_atom(atom, numbers) for atom in eqn.invars)
            is_barrier = eqn.primitive.name == "optimization_barrier"
            if is_barrier and self.sees_through_barriers:
                numbers.update(zip(eqn.outvars, operands, strict=True))
            else:
                repeats = not is_barrier and is_repeatable(eqn)
                made = (work_key(eqn), operands) if repeats else ("new", len(self.known))
                numbers.update({var: self._of(made, place) for place, var in enumerate(eqn.outvars)})
        return numbers

    def of_loop(self, scan: Scan, around: dict[Any, int]) -> dict[Any, int]:
        """The numbers of the variables of a scan's body, for any one layer; and notes what its stacks hold."""
        body, inputs, constants = scan.body, scan.inputs, closed_consts(scan.closed)
        consts, _, stacks = scan.split(self.of_atom(atom, around) for atom in scan.eqn.invars)
        given = {var: self._of("constant", id(value)) for var, value in zip(body.constvars, constants, strict=True)}
        given |= dict(zip(inputs.consts, consts, strict=True))
        given |= {var: self._of("layer", stack) for var, stack in zip(inputs.xs, stacks, strict=True)}
        numbers = self.of_place(body, given)
        for stack, atom in zip(scan.results.ys, scan.outputs.ys, strict=True):
            self.known["layer", around[stack]] = self.of_atom(atom, numbers)
        return numbers

    def of_atom(self, atom: Any, numbers: Mapping[Any, int]) -> int:
        """Of arrays without elements, which kernels are given for what they need not have, one is like the other."""
        if 0 in atom.aval.shape:
            return self._of("empty", atom.aval.shape, atom.aval.dtype)
        return self._of("literal", literal_bits(atom)) if isinstance(atom, jex.Literal) else numbers[atom]

    def _of(self, *key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))


def is_repeatable(eqn: Any) -> bool:
    """Whether ``eqn`` gives the same results whenever it is given the same operands, and does nothing else."""
    return not has_side_effects(eqn) and not contains(eqn, UNREPEATABLE)


def work_key(eqn: Any) -> Hashable:
    """Equal for equations that do the same to their operands."""
    try:
        params: Hashable = tuple((name, _key(value)) for name, value in sorted(eqn.params.items()))
    except RecursionError:  # a parameter that holds itself
        params = id(eqn)
    return eqn.primitive.name, trace_context(eqn), params


def _key(value: Any) -> Hashable:
    """Equal only for parameters that mean the same; what cannot be compared is the same if it is one object."""
    if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)):
        return _jaxpr_key(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_key, value))
    if isinstance(value, Mapping):
        return type(value), tuple((_key(name), _key(item)) for name, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return type(value), tuple((name, _key(getattr(value, name, None))) for name in fields)
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value


def _jaxpr_key(jaxpr: Any) -> Hashable:
    """Of what a jaxpr computes; its constants are the same if they are one object."""
    flat = open_jaxpr(jaxpr)
    names: dict[Any, int] = {}

    def read(atom: Any) -> Hashable:
        return literal_bits(atom) if isinstance(atom, jex.Literal) else names[atom]

    def define(variables: Any) -> tuple[str, ...]:
        names.update({var: len(names) + place for place, var in enumerate(variables)})
        return tuple(str(var.aval) for var in variables)

    inputs = define([*flat.constvars, *flat.invars])
    lines = [(work_key(eqn), tuple(map(read, eqn.invars)), define(eqn.outvars)) for eqn in flat.eqns]
    return inputs, tuple(lines), tuple(map(read, flat.outvars)), tuple(map(id, closed_consts(jaxpr)))
