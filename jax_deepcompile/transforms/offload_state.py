"""State that is in the host's memory between steps, and passes through the device as it is updated.

Before::

    m' = f(m, g); p' = h(p, m')

After, for one parameter after the other::

    d = to_device(m); e = f(d, g); p' = h(p, e); m' = to_host(e)

Two parameters at a time are on their way: what the next but one needs waits until the results of this one are there. So
copies run both ways at once, and the device holds a few leaves instead of all.

Guarantees: values are bitwise the same; each leaf is copied in once and out once; the memory that a donated leaf has on
the host is that of its successor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import free_variables, variables
from jax_deepcompile.analysis.names import parameter_names
from jax_deepcompile.ir.memory import DEVICE, HOST, HOST_KIND
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import compute, read, trace_blocks
from jax_deepcompile.transforms.decision import Decision, positions


@dataclass(frozen=True)
class OffloadedState(Decision, kind="offload_state"):
    """Leaves of the state are in the host's memory between steps.

    Attributes:
      leaves: by path.
    """

    leaves: tuple[str, ...]

    def subjects(self) -> tuple[str, ...]:
        return self.leaves

    def describe(self) -> str:
        return f"in the host's memory between steps: {', '.join(self.leaves)}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[OffloadedState]) -> Program:
        named = [name for each in decisions for name in each.leaves]
        known = movable(program)
        chosen = [list(known)[place] for place in positions(named, list(known.values()), "has on the host")]
        return _moved(program, mesh, sorted(chosen)) if chosen else program


def movable(program: Program) -> dict[int, str]:
    """By position the names of the inputs that may be on the host: state whose memory its successor takes."""
    names = parameter_names(program)
    return {place: names[place] for place, _ in program.state_outputs if program.inputs[place].shape}


def _moved(program: Program, mesh: AnyMesh, leaves: list[int]) -> Program:
    successors = dict(program.state_outputs)
    results = {successors[place] for place in leaves}
    there = program.replace(
        inputs=tuple(_on_host(port, place in leaves) for place, port in enumerate(program.inputs)),
        outputs=tuple(_on_host(port, place in results) for place, port in enumerate(program.outputs)),
    )

    def body(consts, *blocks):
        return _updated(program, consts, blocks, leaves, results)

    return there.replace(jaxpr=trace_blocks(body, there, mesh))


def _on_host(port: Any, is_there: bool) -> Any:
    return replace(port, memory_kind=HOST_KIND) if is_there else port


def _updated(program: Program, consts: Sequence, blocks: Sequence, leaves: Sequence[int], results: set[int]) -> list:
    """The program's results, of blocks of which the ``leaves`` are on the host."""
    jaxpr = open_jaxpr(program.jaxpr)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *blocks), strict=True))
    host = {jaxpr.invars[place]: known.pop(jaxpr.invars[place]) for place in leaves}
    groups = _together(jaxpr, list(host))
    later = {id(eqn) for group in groups for eqn in group.eqns}
    known = compute([eqn for eqn in jaxpr.eqns if id(eqn) not in later], known)
    back: dict[int, Any] = {}
    done: list[list] = []
    for group in groups:
        awaited = done[-_IN_FLIGHT] if len(done) >= _IN_FLIGHT else [known[var] for var in group.reads]
        waiting, _ = lax.optimization_barrier(([host[leaf] for leaf in group.leaves], awaited))
        here = {leaf: jax.device_put(value, DEVICE) for leaf, value in zip(group.leaves, waiting, strict=True)}
        known = compute(group.eqns, known | here)
        made = {*group.leaves, *(var for eqn in group.eqns for var in eqn.outvars)}
        places = [place for place in results if jaxpr.outvars[place] in made]
        back |= {place: jax.device_put(known[jaxpr.outvars[place]], HOST) for place in places}
        done.append([back[place] for place in places])
    return [back[place] if place in back else read(atom, known) for place, atom in enumerate(jaxpr.outvars)]


_IN_FLIGHT = 2
"""Groups that are on their way at a time: one comes in while the other goes out."""


@dataclass(frozen=True)
class _Group:
    """Leaves that one value is made of.

    Attributes:
      eqns: that read one of them, or what is made of it.
      reads: what else those read.
    """

    leaves: tuple
    eqns: tuple

    @property
    def reads(self) -> list:
        return [var for var in free_variables(self.eqns, ()) if var not in self.leaves]


def _together(jaxpr: Any, leaves: Sequence) -> list[_Group]:
    """``leaves`` in groups, in order of first use."""
    group_of = {leaf: (leaf,) for leaf in leaves}
    reached: dict[Any, Any] = {leaf: leaf for leaf in leaves}
    reader: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        found = [reached[atom] for atom in variables(eqn.invars) if atom in reached]
        if found:
            joined = tuple(dict.fromkeys(leaf for each in found for leaf in group_of[each]))
            group_of |= dict.fromkeys(joined, joined)
            reached |= dict.fromkeys(eqn.outvars, found[0])
            reader[id(eqn)] = found[0]
    groups = dict.fromkeys(group_of.values())
    return [_Group(group, tuple(eqn for eqn in jaxpr.eqns if reader.get(id(eqn)) in group)) for group in groups]
