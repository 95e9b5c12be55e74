"""The one type every part of the compiler speaks: a jaxpr and what each of its inputs and outputs is."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from jax.extend import core as jex

from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.paths import Leaf, tree_of
from jax_deepcompile.ir.placement import MeshAxes, Placement
from jax_deepcompile.summary import Branch, Summarized, Summary, axes_text, size_text

AS_JITTED = "as jax.jit was told"
"""Why an argument is static, and so no input of a program."""


class Role(StrEnum):
    """What an input or output is to the user."""

    PARAM = "param"
    OPTIMIZER = "optimizer"
    BATCH = "batch"
    OTHER = "other"

    @property
    def is_state(self) -> bool:
        return self in (Role.PARAM, Role.OPTIMIZER)


class View(StrEnum):
    """Whether shapes are those of whole values or of one device's blocks."""

    GLOBAL = "global"
    LOCAL = "local"


@dataclass(frozen=True)
class Port:
    """One input or output.

    Attributes:
      path: where the user finds it, such as ``state.params['kernel']``.
      role: what it is.
      shape: its whole shape.
      dtype: its dtype's name.
      placement: where it lives on the mesh; None until partitioned.
      memory_kind: ``device`` or ``pinned_host``.
    """

    path: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    placement: Placement | None = None
    memory_kind: str = "device"

    def placed(self, placement: Placement) -> Port:
        return replace(self, placement=placement)

    @property
    def where(self) -> Placement:
        """The placement of a port that has one."""
        assert self.placement is not None, self.path
        return self.placement


@dataclass(frozen=True, repr=False)
class Program(Summarized):
    """A train step (or a state's initialisation) on its way to the machine.

    Attributes:
      name: the user's function.
      jaxpr: closed; in the local view it contains collectives over the mesh's axes.
      inputs: one port for each input of the jaxpr.
      outputs: one port for each output.
      out_tree: the ``PyTreeDef`` that the user nests the outputs in.
      state_outputs: pairs (input, output): the output is the next step's input, and takes its buffer.
      mesh: the axes it is (to be) partitioned over.
      view: whether shapes in the jaxpr are global or local.
      loop_names: what plans call its loops, by where they are; see ``analysis.names``.
    """

    name: str
    jaxpr: jex.ClosedJaxpr
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    out_tree: Any
    state_outputs: tuple[tuple[int, int], ...]
    mesh: MeshAxes
    view: View = View.GLOBAL
    loop_names: Mapping[tuple[int, ...], str] = field(default_factory=dict)

    def replace(self, **changes) -> Program:
        """Itself where nothing is another object."""
        same = all(value is getattr(self, name) for name, value in changes.items())
        return self if same else replace(self, **changes)

    @functools.cached_property
    def unread_state(self) -> frozenset[int]:
        """Positions of the state that nothing is computed of and nothing succeeds, as of moments in an evaluation."""
        jaxpr = self.jaxpr.jaxpr
        read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if not isinstance(atom, jex.Literal)}
        read.update(atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal))
        read.update(jaxpr.invars[source] for source, _ in self.state_outputs)
        pairs = enumerate(zip(jaxpr.invars, self.inputs, strict=True))
        return frozenset(at for at, (var, port) in pairs if port.role.is_state and var not in read)

    @property
    def mesh_text(self) -> str:
        return axes_text(self.mesh.devices.names, self.mesh.devices.sizes)

    def state_rows(self) -> tuple[tuple[str, str], ...]:
        """Its state's leaves and bytes, for a summary."""
        leaves = [var for var, port in zip(self.jaxpr.jaxpr.invars, self.inputs, strict=True) if port.role.is_state]
        size = sum(map(size_bytes, leaves))
        return (("state", f"{size_text(size)} {self._where}, {len(leaves)} leaves"),)

    @property
    def _where(self) -> str:
        return "a device" if self.view is View.LOCAL else "in all"

    def state_tree(self, gathered: Mapping[int, Sequence[str]] | None = None) -> Branch:
        """Its state, to look at: how each leaf is divided and what it takes; nothing but shapes is read.

        Args:
          gathered: where what an input holds is gathered, in words, by the position of the input.
        """
        known = gathered or {}
        pairs = enumerate(zip(self.inputs, self.jaxpr.jaxpr.invars, strict=True))
        state = [(at, port, size_bytes(var)) for at, (port, var) in pairs if port.role.is_state]
        leaves = [Leaf(port.path, size, tuple(self._facts(port, size, known.get(at, ())))) for at, port, size in state]
        return tree_of(leaves, self._where)

    def _facts(self, port: Port, size: int, gathered: Sequence[str]) -> Iterator[str]:
        yield f"{port.dtype}[{','.join(map(str, port.shape))}]"
        if port.placement is not None:
            how = port.placement.on_devices(self.mesh)
            local = ",".join(map(str, how.local_shape(port.shape, self.mesh.devices)))
            yield how.describe(self.mesh.devices) + (f" = [{local}]" if how.is_split else "")
        yield f"{size_text(size)} {self._where}"
        if port.memory_kind != "device":
            yield "on the host between steps"
        if gathered:
            yield f"gathered: {', '.join(gathered)}"

    def _summary(self) -> Summary:
        roles = Counter("state" if port.role.is_state else str(port.role) for port in self.inputs)
        inputs = ", ".join(f"{count} {role}" for role, count in roles.items())
        rows = (("mesh", self.mesh_text), ("inputs", inputs), *self.state_rows())
        return Summary(f"Program {self.name}, {self.view} view; print() shows its jaxpr", rows, (self.state_tree(),))

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in zip(self.mesh.names, self.mesh.sizes, strict=True))
        return f"# {self.name}: {self.view} view on {mesh}\n{self.jaxpr}"
