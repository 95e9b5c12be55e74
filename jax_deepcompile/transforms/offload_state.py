"""State that is in the host's memory between steps, and passes through the device as it is updated.

Before::

    m' = f(m, g); p' = h(p, m')

After, for one parameter after the other::

    d = to_device(m); e = f(d, g); p' = h(p, e); m' = to_host(e)

Two parameters at a time are on their way: what the next but one needs waits until the results of this one are there. So
copies run both ways at once, and the device holds a few leaves instead of all. Where even those are too large, stacks
are updated in a loop, a layer at a time::

    loop(t): d = to_device(m[t]); e = f(d, g[t]); p[t] = h(p[t], e); m[t] = to_host(e)

Guarantees: values are bitwise the same; each leaf is copied in once and out once, one that does not change not at all;
the memory that a donated leaf has on the host is that of its successor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import free_variables, variables
from jax_deepcompile.analysis.gathers import size_bytes
from jax_deepcompile.analysis.names import parameter_names
from jax_deepcompile.ir.memory import DEVICE, HOST, HOST_KIND, is_on_host
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import ELEMENTWISE
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import compute, read, trace_blocks
from jax_deepcompile.transforms.decision import Decision, positions


@dataclass(frozen=True)
class OffloadedState(Decision, kind="offload_state"):
    """Leaves of the state are in the host's memory between steps.

    Attributes:
      leaves: by path.
      by_layer: whether stacks are updated a layer at a time, where that is elementwise.
    """

    leaves: tuple[str, ...]
    by_layer: bool = False

    def subjects(self) -> tuple[str, ...]:
        return self.leaves

    def describe(self) -> str:
        how = ", updated a layer at a time" * self.by_layer
        return f"in the host's memory between steps{how}: {', '.join(self.leaves)}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[OffloadedState]) -> Program:
        named = [name for each in decisions for name in each.leaves]
        known = movable(program)
        chosen = [list(known)[place] for place in positions(named, list(known.values()), "has on the host")]
        by_layer = any(each.by_layer for each in decisions)
        return _moved(program, mesh, sorted(chosen), by_layer) if chosen else program


def movable(program: Program) -> dict[int, str]:
    """By position the names of the inputs that may be on the host: state whose memory its successor takes."""
    names, variables = parameter_names(program), open_jaxpr(program.jaxpr).invars
    return {place: names[place] for place, _ in program.state_outputs if _is_movable(variables[place].aval)}


def _is_movable(aval: Any) -> bool:
    """Whether there is something to copy; scalars and random keys stay."""
    return bool(aval.shape) and aval.size > 0 and isinstance(aval.dtype, np.dtype)


def _moved(program: Program, mesh: AnyMesh, leaves: list[int], by_layer: bool) -> Program:
    successors = dict(program.state_outputs)
    results = {successors[place]: place for place in leaves}
    there = program.replace(
        inputs=tuple(_on_host(port, place in leaves) for place, port in enumerate(program.inputs)),
        outputs=tuple(_on_host(port, place in results) for place, port in enumerate(program.outputs)),
    )

    def body(consts, *blocks):
        return _updated(program, consts, blocks, leaves, results, by_layer)

    return there.replace(jaxpr=trace_blocks(body, there, mesh))


def _on_host(port: Any, is_there: bool) -> Any:
    return replace(port, memory_kind=HOST_KIND) if is_there else port


def _updated(
    program: Program,
    consts: Sequence,
    blocks: Sequence,
    leaves: Sequence[int],
    results: Mapping[int, int],
    by_layer: bool,
) -> list:
    """The program's results, of blocks of which the ``leaves`` are on the host.

    Args:
      results: positions of the outputs that succeed leaves, each with that of its leaf.
    """
    jaxpr = open_jaxpr(program.jaxpr)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *blocks), strict=True))
    host = {jaxpr.invars[place]: known.pop(jaxpr.invars[place]) for place in leaves}
    successors = {jaxpr.invars[leaf]: jaxpr.outvars[place] for place, leaf in results.items()}
    back = {leaf: host[leaf] for leaf, successor in successors.items() if leaf is successor}
    others = variables(atom for place, atom in enumerate(jaxpr.outvars) if place not in results)
    needed = {*variables(atom for eqn in jaxpr.eqns for atom in eqn.invars), *others} | {*successors.values()} - {*back}
    groups = _together(jaxpr, list(host))
    later = {id(eqn) for group in groups for eqn in group.eqns}
    donors = {jaxpr.outvars[result]: jaxpr.invars[place] for place, result in program.state_outputs}
    known = compute([eqn for eqn in jaxpr.eqns if id(eqn) not in later], known)
    early = {leaf: successor for leaf, successor in successors.items() if successor in known}
    done: list[list] = []
    for group in groups:
        fetched = [leaf for leaf in group.leaves if leaf in needed]
        awaited = done[-_IN_FLIGHT] if len(done) >= _IN_FLIGHT else [known[var] for var in group.reads]
        waiting, _ = lax.optimization_barrier(([host[leaf] for leaf in fetched], awaited)) if fetched else ([], [])
        here = dict(zip(fetched, waiting, strict=True))
        away = [var for var in dict.fromkeys(successors.values()) if var in group.makes and var not in back]
        made = [var for var in dict.fromkeys(variables(jaxpr.outvars)) if var in group.makes and var not in back]
        alone = all(donors[var] in here for var in away) and not {*away, *group.leaves} & {*others, *early}
        layers = _Layers.of(jaxpr, group) if by_layer and alone else None
        if layers is not None:
            made_by_layer = layers.run(known | here, made, donors, {*away})
            known |= made_by_layer
            back |= {var: made_by_layer[var] for var in away}
        else:
            known = compute(group.eqns, known | {leaf: jax.device_put(value, DEVICE) for leaf, value in here.items()})
            away += [early[leaf] for leaf in group.leaves if leaf in early]
            back |= {var: jax.device_put(known[var], HOST) for var in away}
        if away:
            done.append([back[var] for var in away])
    return [back[atom] if place in results else read(atom, known) for place, atom in enumerate(jaxpr.outvars)]


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

    @property
    def makes(self) -> set:
        return {*self.leaves, *(var for eqn in self.eqns for var in eqn.outvars)}


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


@dataclass(frozen=True)
class _Layers:
    """The elementwise update of stacks of one shape, a layer at a time.

    Attributes:
      shape: of every stack.
      eqns: of the update, and cheap ones before it, so that no stack is there that only this reads.
    """

    shape: tuple[int, ...]
    eqns: tuple

    @classmethod
    def of(cls, jaxpr: Any, group: _Group) -> _Layers | None:
        """None where not every equation is elementwise, on stacks of one shape and on scalars."""
        shape = group.leaves[0].aval.shape
        if len(shape) < 2 or size_bytes(group.leaves[0]) < shape[0] * _LAYER_BYTES:
            return None
        makers = {var: eqn for eqn in jaxpr.eqns if _is_elementwise(eqn, shape) for var in eqn.outvars}
        others = [leaf for leaf in group.leaves if leaf.aval.shape != shape]
        if others or any(eqn.outvars[0] not in makers for eqn in group.eqns):
            return None
        needed, waiting = set(), [var for eqn in group.eqns for var in eqn.outvars]
        while waiting:
            eqn = makers.get(waiting.pop())
            if eqn is not None and id(eqn) not in needed and eqn.outvars[0].aval.shape:
                needed.add(id(eqn))
                waiting += variables(eqn.invars)
        return cls(shape, tuple(eqn for eqn in jaxpr.eqns if id(eqn) in needed))

    def run(self, known: Mapping[Any, Any], made: Sequence, donors: Mapping[Any, Any], away: set) -> dict:
        """What is ``made``, in the memory of its donor where it has one."""
        starts = [known[donors[var]] if var in donors else lax.empty(var.aval.shape, var.aval.dtype) for var in made]
        places = {donors[var]: place for place, var in enumerate(made) if var in donors}

        def layer(t: Any, stacks: list) -> list:
            def cut(var: Any) -> Any:
                stack = stacks[places[var]] if var in places else known[var]
                if var.aval.shape != self.shape:
                    return stack
                value = lax.dynamic_index_in_dim(stack, t, keepdims=True)
                return jax.device_put(value, DEVICE) if is_on_host(value) else value

            here = compute(self.eqns, {var: cut(var) for var in free_variables(self.eqns, made)})
            values = [jax.device_put(here[var], HOST) if var in away else here[var] for var in made]
            return [
                lax.dynamic_update_slice_in_dim(stack, value, t, 0) for stack, value in zip(stacks, values, strict=True)
            ]

        return dict(zip(made, lax.fori_loop(0, self.shape[0], layer, starts), strict=True))


def _is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    name = eqn.primitive.name
    shapes = {atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)}
    return name in ELEMENTWISE and name != "reshape" and shapes <= {shape, ()}


_LAYER_BYTES = 1 << 20
"""What is less is not worth a turn of a loop."""
