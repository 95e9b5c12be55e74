"""Small values that are divided just to be put together again are computed whole on every device.

What a step keeps divided, such as running averages and scales of norms, draws the arithmetic on it to its shards. Where
devices wait for each other longer than that arithmetic takes, a reduction that makes the value whole at once saves the
gather after it.

Before::

    m = reduce_scatter(p); r = rsqrt(m + e); R = all_gather(r); a = 0.9 * b + m

After::

    M = psum(p); R = rsqrt(M + e); m = own_part(M); a = 0.9 * b + m

Guarantees: values are bitwise the same; no more bytes are sent than by the reduction and the gather; what the reduced
value meets on its way is gathered for it, if it is an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jax_deepcompile._jax_compat import bind, open_jaxpr
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import REPLICATE, AnyMesh
from jax_deepcompile.ir.primitives import ELEMENTWISE, NAMES_AXES, Collective, axis_names
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Replacement, compute, read, trace_blocks
from jax_deepcompile.ir.traversal import bodies
from jax_deepcompile.transforms.decision import Decision, refused


@dataclass(frozen=True)
class ComputedWhole(Decision, kind="compute_whole"):
    """Small values outside of loops are computed whole.

    Attributes:
      up_to_bytes: of a whole value; no larger one becomes whole.
    """

    up_to_bytes: int

    def check(self, program: Program) -> None:
        if self.up_to_bytes < 0:
            raise refused(f"it computes values of {self.up_to_bytes} bytes whole")

    def describe(self) -> str:
        return f"values of up to {self.up_to_bytes / 2**10:.0f} KiB that are reduced to be gathered are computed whole"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[ComputedWhole]) -> Program:
        for each in decisions:
            divided = [name for name, size in zip(program.mesh.names, program.mesh.sizes, strict=True) if size > 1]
            if len(divided) != 1 or program.mesh.virtual:
                continue
            parts = _Parts(program, divided[0], each.up_to_bytes)
            if gathers := parts.gathers():
                program = program.replace(jaxpr=trace_blocks(partial(_evaluated, parts, gathers), program, mesh))
        return program


@dataclass
class _Parts:
    """Which divided values of a program can be had whole, and what of.

    Attributes:
      axis: the one axis of the mesh that divides anything.
      dims: for each value that is to be whole the dimension that it is divided along.
    """

    program: Program
    axis: str
    up_to_bytes: int
    dims: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jaxpr = open_jaxpr(self.program.jaxpr)
        self.count = self.program.mesh.size_of((self.axis,))
        self.makers = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}
        replicated = (all(state == REPLICATE for state in port.where.axes) for port in self.program.inputs)
        self.equal: dict[Any, bool] = dict(zip(self.jaxpr.invars, replicated, strict=True))

    def gathers(self) -> set[int]:
        """The gathers, by ``id``, of what can be whole; ``dims`` has what must be for that."""
        found = set()
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name == "all_gather" and axis_names(eqn) == (self.axis,):
                dim, needed = Collective(eqn).dimension, dict[Any, int]()
                if dim is not None and self._whole(eqn.invars[0], dim, needed) and self._reduces(needed):
                    self.dims |= needed
                    found.add(id(eqn))
        return found

    def _reduces(self, needed: Mapping[Any, int]) -> bool:
        """Whether a reduction is among what makes ``needed``: gathers of inputs alone stay as they are."""
        makers = [self.makers[var].primitive.name for var in needed if var in self.makers]
        return "reduce_scatter" in makers or not self.dims.keys().isdisjoint(needed)

    def _whole(self, var: Any, dim: int, needed: dict[Any, int]) -> bool:
        """Whether ``var``, divided along ``dim``, can be had whole; adds what must be for that to ``needed``."""
        if needed.get(var, self.dims.get(var)) == dim:
            needed[var] = dim
            return True
        eqn = self.makers.get(var)
        if var in needed or var in self.dims or self.count * size_bytes(var) > self.up_to_bytes:
            return False
        if eqn is None:
            ports = dict(zip(self.jaxpr.invars, self.program.inputs, strict=True))
            if var not in ports or dim not in ports[var].where.axes:
                return False
        elif eqn.primitive.name == "reduce_scatter":
            if Collective(eqn).dimension != dim or Collective(eqn).axes != (self.axis,):
                return False
        elif not self._is_own_part(eqn, dim):
            operands = self.operands(eqn, var, dim)
            if operands is None or not all(self._whole(each, along, needed) for each, along in operands):
                return False
        needed[var] = dim
        return True

    def operands(self, eqn: Any, var: Any, dim: int) -> list[tuple[Any, int]] | None:
        """What ``eqn`` makes ``var``, whole along ``dim``, of, with their dimensions; None if it cannot."""
        name, shape = eqn.primitive.name, var.aval.shape
        if name == "optimization_barrier":
            return [(eqn.invars[eqn.outvars.index(var)], dim)]
        if name == "broadcast_in_dim":
            (operand,), to = eqn.invars, eqn.params["broadcast_dimensions"]
            if dim not in to or operand.aval.shape[to.index(dim)] != shape[dim]:
                return [] if self._is_equal(operand) else None
            return [(operand, to.index(dim))]
        if name == "reshape":
            before = [operand_dim for operand_dim, size in enumerate(eqn.invars[0].aval.shape) if size > 1]
            after = [own for own, size in enumerate(shape) if size > 1]
            sizes = [eqn.invars[0].aval.shape[each] for each in before]
            same = sizes == [shape[each] for each in after] and dim in after
            return [(eqn.invars[0], before[after.index(dim)])] if same else None
        if name == "reduce_sum":
            kept = [each for each in range(eqn.invars[0].aval.ndim) if each not in eqn.params["axes"]]
            return [(eqn.invars[0], kept[dim])]
        if name not in ELEMENTWISE or len(eqn.outvars) != 1:
            return None
        scalars = [atom for atom in eqn.invars if not atom.aval.shape]
        if not all(map(self._is_equal, scalars)) or any(atom.aval.shape not in ((), shape) for atom in eqn.invars):
            return None
        return [(atom, dim) for atom in eqn.invars if atom.aval.shape]

    def _is_equal(self, atom: Any) -> bool:
        """Whether ``atom`` is the same on all devices."""
        if isinstance(atom, jex.Literal):
            return True
        if atom not in self.equal:
            eqn = self.makers.get(atom)
            if eqn is None or bodies(eqn):
                self.equal[atom] = False
            elif eqn.primitive.name in ("psum", "all_gather"):
                self.equal[atom] = axis_names(eqn) == (self.axis,)
            else:
                alike = eqn.primitive.name not in NAMES_AXES and all(map(self._is_equal, eqn.invars))
                self.equal[atom] = alike
        return self.equal[atom]

    def _is_own_part(self, eqn: Any, dim: int) -> bool:
        """Whether ``eqn`` cuts each device's part along ``dim`` out of what all have."""
        if eqn.primitive.name != "dynamic_slice" or not self._is_equal(eqn.invars[0]):
            return False
        shape, part = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if shape != (*part[:dim], self.count * part[dim], *part[dim + 1 :]):
            return False
        start = eqn.invars[1 + dim]
        return all(self._number(start, device) == device * part[dim] for device in range(self.count))

    def _number(self, atom: Any, device: int) -> int | None:
        """The whole number that ``atom`` is on ``device``; None if it depends on more than that."""
        if isinstance(atom, jex.Literal):
            return int(atom.val)
        eqn = self.makers.get(atom)
        if eqn is None or atom.aval.shape or eqn.primitive.name not in _ARITHMETIC:
            return None
        numbers = [self._number(each, device) for each in eqn.invars]
        if None in numbers or (eqn.primitive.name == "axis_index" and axis_names(eqn) != (self.axis,)):
            return None
        return device if eqn.primitive.name == "axis_index" else _ARITHMETIC[eqn.primitive.name](*numbers)


_ARITHMETIC: Mapping[str, Any] = {
    "axis_index": None,
    "mul": lambda one, other: one * other,
    "add": lambda one, other: one + other,
    "lt": lambda one, other: int(one < other),
    "select_n": lambda which, *cases: cases[which],
    "convert_element_type": lambda number: number,
}
"""What an index of a device's part is made of."""


def _evaluated(parts: _Parts, gathers: set[int], consts: Sequence, *values: Any) -> list:
    """The program evaluated with the values of ``parts`` whole, and without their ``gathers``."""
    flat, axis = parts.jaxpr, parts.axis
    known = dict(zip((*flat.constvars, *flat.invars), (*consts, *values), strict=True))
    inputs = {var: dim for var, dim in parts.dims.items() if var in known}
    whole = {var: lax.all_gather(known[var], axis, axis=dim, tiled=True) for var, dim in inputs.items()}

    def gathered(eqn: Any, operands: list) -> list:
        return [whole[eqn.invars[0]]]

    def reduced(eqn: Any, operands: list) -> list:
        var, dim = eqn.outvars[0], parts.dims[eqn.outvars[0]]
        whole[var] = lax.psum(operands[0], axis)
        width = var.aval.shape[dim]
        return [lax.dynamic_slice_in_dim(whole[var], lax.axis_index(axis) * width, width, dim)]

    def computed(eqn: Any, operands: list) -> list:
        for var in parts.dims.keys() & set(eqn.outvars):
            divided = {id(atom) for atom, _ in parts.operands(eqn, var, parts.dims[var]) or ()}
            needed = {place: whole[atom] for place, atom in enumerate(eqn.invars) if id(atom) in divided}
            whole[var] = _whole_result(eqn, var, parts, [needed.get(*each) for each in enumerate(operands)])
        return bind(eqn, operands)

    instead: dict[int, Replacement] = {}
    for eqn in flat.eqns:
        if not parts.dims.keys().isdisjoint(eqn.outvars):
            instead[id(eqn)] = reduced if eqn.primitive.name == "reduce_scatter" else computed
        if id(eqn) in gathers:
            instead[id(eqn)] = gathered
    known = compute(flat.eqns, known, instead)
    return [read(atom, known) for atom in flat.outvars]


def _whole_result(eqn: Any, var: Any, parts: _Parts, operands: Sequence) -> jax.Array:
    """``var``, which ``eqn`` makes, of ``operands`` that are whole where they are divided."""
    name, dim, shape = eqn.primitive.name, parts.dims[var], var.aval.shape
    shape = (*shape[:dim], parts.count * shape[dim], *shape[dim + 1 :])
    if name == "dynamic_slice":
        return operands[0]
    if name == "optimization_barrier":
        return operands[eqn.outvars.index(var)]
    if name == "reshape":
        return operands[0].reshape(shape)
    if name == "broadcast_in_dim":
        return lax.broadcast_in_dim(operands[0], shape, eqn.params["broadcast_dimensions"])
    return bind(eqn, operands)[0]
