"""Which dimension of every state leaf is split over the sharding axes.

Leaves that meet elementwise (a parameter, its gradient, its moments, its average) want the same dimension, or every
step would move them; they are found by walking the program, not by their names. Of the dimensions that divide evenly
the first one is taken that is not a loop's: a stack of layers must be split inside its layers, so that a layer is
gathered when its turn comes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.ir.primitives import ELEMENTWISE, SLICES, Cond, Scan, While
from jax_deepcompile.ir.program import Port, Program


@dataclass(frozen=True)
class LeafChoice:
    """What was decided for one state leaf, and why."""

    path: str
    placement: Placement
    reason: str
    """Empty when it is split on its first dimension; else what stood in the way."""
    bytes_per_device: int


def choose_state_placements(program: Program, axes: Sequence[str], role_ports: Sequence[Port]) -> list[LeafChoice]:
    """Decides every port of ``role_ports``, a step's inputs or an initialisation's outputs, that is state."""
    jaxpr, groups = open_jaxpr(program.jaxpr), _Groups()
    atoms = jaxpr.invars if role_ports is program.inputs else jaxpr.outvars
    groups.read(jaxpr)
    for source, target in program.state_outputs:
        groups.join(jaxpr.invars[source], jaxpr.outvars[target])
    loop_dims = [groups.loop_dims(atom) for atom in atoms]
    if role_ports is program.outputs:
        loop_dims = _as_of_equal_shape(role_ports, loop_dims)
    return [_choose_leaf(port, dims, axes, program.mesh) for port, dims in zip(role_ports, loop_dims, strict=True)]


def _as_of_equal_shape(ports: Sequence[Port], loop_dims: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """When a state is created its moments have yet to meet their parameters; they are told by their shapes."""
    known: dict[tuple[int, ...], frozenset[int]] = {}
    for port, dims in zip(ports, loop_dims, strict=True):
        known[port.shape] = known.get(port.shape, frozenset()) | dims
    return [known[port.shape] for port in ports]


def _choose_leaf(port: Port, loop_dims: frozenset[int], axes: Sequence[str], mesh: MeshAxes) -> LeafChoice:
    is_key = port.dtype.startswith("key<")
    size = math.prod(port.shape) * (8 if is_key else jnp.dtype(port.dtype).itemsize)
    parts = mesh.size_of(axes)
    if not port.role.is_state or not size or not port.shape or is_key:
        return LeafChoice(port.path, mesh.replicated(), "", size)
    fitting = [dim for dim, extent in enumerate(port.shape) if extent % parts == 0 and extent]
    if not fitting:
        return _choose_axis_by_axis(port, loop_dims, axes, mesh, size)
    dim = next((dim for dim in fitting if dim not in loop_dims), fitting[0])
    reason = "" if dim == 0 else f"dimension {dim}: {_why_not_before(port.shape, dim, loop_dims, parts)}"
    return LeafChoice(port.path, mesh.place({dim: axes}), reason, size // parts)


def _choose_axis_by_axis(
    port: Port, loop_dims: frozenset[int], axes: Sequence[str], mesh: MeshAxes, size: int
) -> LeafChoice:
    """No dimension takes all axes: each axis goes to the first that takes it, and a leaf that takes none is replicated.

    Padding would divide it too, but then the state would come back to the user in another shape.
    """
    placed: dict[int, list[str]] = {}
    for name in axes:
        for dim in sorted(range(len(port.shape)), key=lambda dim: dim in loop_dims):
            if port.shape[dim] % mesh.size_of([*placed.get(dim, []), name]) == 0:
                placed.setdefault(dim, []).append(name)
                break
    placement = mesh.place(placed)
    parts = mesh.size_of(axes)
    padded = min(-(-extent // parts) * parts / extent for extent in port.shape) - 1
    outcome = "divided axis by axis" if placed else "replicated"
    reason = (
        f"{outcome}: no dimension of {port.shape} divides by {parts}; padded by {padded:.1%} it would, at the price of "
        f"another shape in your state"
    )
    held = math.prod(mesh.size_of(names) for names in placed.values())
    return LeafChoice(port.path, placement, reason, size // held)


def _why_not_before(shape, dim: int, loop_dims: frozenset[int], parts: int) -> str:
    return ", ".join(
        f"{before} is a loop's" if before in loop_dims else f"{before} ({shape[before]}) does not divide by {parts}"
        for before in range(dim)
    )


@dataclass
class _Groups:
    """Union-find over the values of a jaxpr that meet elementwise in one shape, with each group's loop dimensions."""

    parent: dict = field(default_factory=dict)
    loops: dict = field(default_factory=dict)

    def read(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in ELEMENTWISE:
                for atom in eqn.invars:
                    self.join(atom, eqn.outvars[0])
            elif name == "optimization_barrier":
                for before, after in zip(eqn.invars, eqn.outvars, strict=True):
                    self.join(before, after)
            elif name in SLICES:
                self._cut(eqn)
            elif name == "unstack":
                self._mark(eqn.invars[0], eqn.params["axis"])
            elif name == "random_bits":
                for dim in range(len(eqn.invars[0].aval.shape)):
                    self._mark(eqn.outvars[0], dim)
            elif name == "scan":
                self._read_scan(eqn)
            elif name == "while":
                _, consts, carry = While(eqn).operands
                self._read_loop(While(eqn).body, consts, carry, [], eqn.outvars, [])
            elif name == "cond":
                for branch in Cond(eqn).branches:
                    self._read_nested(branch, Cond(eqn).operands, eqn.outvars)

    def _cut(self, eqn: Equation) -> None:
        """A dimension that is taken apart would be gathered just to be cut again."""
        atom = eqn.invars[0]
        for result in eqn.outvars:
            for dim, (whole, part) in enumerate(zip(atom.aval.shape, result.aval.shape, strict=False)):
                if whole != part and len(result.aval.shape) == len(atom.aval.shape):
                    self._mark(atom, dim)

    def _read_scan(self, eqn: Equation) -> None:
        scan = Scan(eqn)
        for atom in [*scan.operands.xs, *scan.results.ys]:
            self._mark(atom, 0)
        self._read_loop(scan.body, *scan.operands, *scan.results)

    def _read_loop(self, body: jex.Jaxpr, consts: list, carry: list, xs: list, final: list, ys: list) -> None:
        for before, after in zip(carry, final, strict=True):
            self.join(before, after)
        self._read_nested(body, [*consts, *carry, *xs], [*final, *ys], (len(consts) + len(carry), len(final)))

    def _read_nested(self, jaxpr: jex.Jaxpr, operands, results, stacked_from: tuple[int, int] | None = None) -> None:
        """What is a loop's inside is a loop's outside, one dimension further in for stacked values."""
        inner = _Groups()
        inner.read(jaxpr)
        first_stacked = stacked_from or (len(operands), len(results))
        together: dict[tuple, Any] = {}
        for outside, inside, limit in ((operands, jaxpr.invars, 0), (results, jaxpr.outvars, 1)):
            for index, (atom, var) in enumerate(zip(outside, inside, strict=True)):
                stacked = index >= first_stacked[limit]
                for dim in inner.loop_dims(var):
                    self._mark(atom, dim + stacked)
                if not isinstance(var, jex.Literal) and not isinstance(atom, jex.Literal):
                    self.join(atom, together.setdefault((inner._root(var), stacked), atom))

    def _mark(self, atom, dim: int) -> None:
        if not isinstance(atom, jex.Literal):
            self.loops.setdefault(self._root(atom), set()).add(dim)

    def join(self, left, right) -> None:
        if isinstance(left, jex.Literal) or isinstance(right, jex.Literal) or left.aval.shape != right.aval.shape:
            return
        a, b = self._root(left), self._root(right)
        if a is not b:
            self.parent[a] = b
            self.loops[b] = self.loops.get(b, set()) | self.loops.pop(a, set())

    def loop_dims(self, atom) -> frozenset[int]:
        return frozenset() if isinstance(atom, jex.Literal) else frozenset(self.loops.get(self._root(atom), ()))

    def _root(self, var):
        while self.parent.setdefault(var, var) is not var:
            self.parent[var] = self.parent[self.parent[var]]
            var = self.parent[var]
        return var
