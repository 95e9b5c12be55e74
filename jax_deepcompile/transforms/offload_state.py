"""State that is in the host's memory between steps, and passes through the device as it is updated.

Before::

    m' = f(m, g); p' = h(p, m')

After, for one parameter after the other::

    d = to_device(m); e = f(d, g); p' = h(p, e); m' = to_host(e)

As much is on its way as two of the largest parameters take: what comes later waits until the results of earlier ones
are there. So copies run both ways at once, and the device holds a few leaves instead of all. Those whose gradients are
there first come first, and the first begin as soon as theirs are, beside what is left of backward and the norm of all
gradients. Where even those are too large, stacks are updated a layer at a time (``stack_updates``).

Guarantees: values are bitwise the same; each leaf is copied in once and out once, one that does not change not at all;
the memory that a donated leaf has on the host is that of its successor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.names import parameter_names
from jax_deepcompile.ir.memory import DEVICE, HOST, HOST_KIND, is_fetch, is_offload, is_on_host, size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Port, Program
from jax_deepcompile.ir.retrace import compute, read, trace_blocks
from jax_deepcompile.ir.rewrite import renamed, with_renamed_operands
from jax_deepcompile.ir.traversal import free_variables, variables
from jax_deepcompile.transforms.decision import Decision, positions
from jax_deepcompile.transforms.stack_updates import StackUpdate, is_elementwise, run, together


@dataclass(frozen=True)
class OffloadedState(Decision, kind="offload_state", on_host=True):
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
    """By position the names of the inputs that may be on the host: state whose memory its successor takes, or of which
    an evaluation computes something."""
    names, variables = parameter_names(program), open_jaxpr(program.jaxpr).invars
    places = [place for place, _ in program.state_outputs]
    if not any(port.role.is_state for port in program.outputs):
        state = (place for place, port in enumerate(program.inputs) if port.role.is_state)
        places += [place for place in state if place not in program.unread_state]
    return {place: names[place] for place in places if _is_movable(variables[place].aval)}


def _is_movable(aval: Any) -> bool:
    """Whether there is something to copy; scalars and random keys stay."""
    return bool(aval.shape) and aval.size > 0 and isinstance(aval.dtype, np.dtype)


def _moved(program: Program, mesh: AnyMesh, leaves: list[int], by_layer: bool) -> Program:
    successors = dict(program.state_outputs)
    results = {successors[place]: place for place in leaves if place in successors}
    there = on_host(program, leaves)

    def body(consts, *blocks):
        return _updated(program, consts, blocks, leaves, results, by_layer)

    return there.replace(jaxpr=trace_blocks(body, there, mesh))


def on_host(program: Program, leaves: Collection[int]) -> Program:
    """``program`` whose ``leaves``, by position, and what succeeds them are said to be in the host's memory."""
    results = {result for place, result in program.state_outputs if place in leaves}

    def moved(port: Port, is_there: bool) -> Port:
        return replace(port, memory_kind=HOST_KIND) if is_there else port

    return program.replace(
        inputs=tuple(moved(port, place in leaves) for place, port in enumerate(program.inputs)),
        outputs=tuple(moved(port, place in results) for place, port in enumerate(program.outputs)),
    )


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
    jaxpr, fetched = _as_if_here(open_jaxpr(program.jaxpr), leaves, results)
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *blocks), strict=True))
    inputs = [fetched.get(var, var) for var in jaxpr.invars]
    host = {inputs[place]: known[jaxpr.invars[place]] for place in leaves}
    known = {var: value for var, value in known.items() if var not in host or is_on_host(var)}
    succeeded = {place: inputs[leaf] for place, leaf in results.items()}
    back = {place: host[leaf] for place, leaf in succeeded.items() if jaxpr.outvars[place] is leaf}
    read_here = {*variables(atom for eqn in jaxpr.eqns for atom in eqn.invars)}
    read_here |= {*variables(atom for place, atom in enumerate(jaxpr.outvars) if place not in back)}
    groups = _together(jaxpr, [leaf for leaf in host if not is_on_host(leaf)])
    order = {var: place for place, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    groups.sort(key=lambda group: max((order[var] for var in group.gradients(jaxpr)), default=0))
    later = {id(eqn) for group in groups for eqn in group.eqns}
    known = compute([eqn for eqn in jaxpr.eqns if id(eqn) not in later], known)
    early = {place for place in results if place not in back and jaxpr.outvars[place] in known}
    donors = {result: inputs[place] for place, result in program.state_outputs}
    results_of, updates = list[list[int]](), list[_Update]()
    for group in groups:
        made = {*group.leaves, *(var for eqn in group.eqns for var in eqn.outvars)}
        places = [place for place in results if place not in back and jaxpr.outvars[place] in made]
        ready = [place for place in early if succeeded[place] in group.leaves]
        in_place = not ready and read_here.issuperset({*group.leaves, *(succeeded[place] for place in places)})
        update = partial(StackUpdate.of, jaxpr, group.leaves, group.eqns, places, donors)
        results_of.append(places + ready)
        updates.append(update if by_layer and in_place else _as_whole)
    in_turns = _in_turns(groups, updates)
    whole = [each for place, each in enumerate(zip(groups, results_of, strict=True)) if place not in in_turns]
    done: list[tuple[int, list]] = []
    room_bytes = _IN_FLIGHT * max((group.size_bytes for group, _ in whole), default=0)
    for group, places in whole:
        behind = _behind(done, room_bytes - group.size_bytes)
        awaited = [known[var] for var in group.gradients(jaxpr)] if behind is None else behind
        here = _once(awaited, {leaf: host[leaf] for leaf in group.leaves if leaf in read_here})
        known = compute(group.eqns, known | {leaf: jax.device_put(value, DEVICE) for leaf, value in here.items()})
        back |= {place: jax.device_put(known[jaxpr.outvars[place]], HOST) for place in places}
        if places:
            done.append((group.size_bytes, [back[place] for place in places]))
    for several in together(list(in_turns.values())):
        leaves_of = [leaf for each in several for leaf in each.leaves]
        awaited = [known[var] for each in groups if each.leaves[0] in leaves_of for var in each.gradients(jaxpr)]
        here = _once([*awaited, *(done[-1][1] if done else ())], {leaf: host[leaf] for leaf in leaves_of})
        made = run(several, known | here, donors)
        gone = [place for each in several for place in each.away]
        back |= {place: made[place] for place in gone}
        known |= {jaxpr.outvars[place]: value for place, value in made.items() if place not in gone}
        done.append((0, [back[place] for place in gone]))
    return [back[place] if place in back else read(atom, known) for place, atom in enumerate(jaxpr.outvars)]


_Update: TypeAlias = Callable[[int | None], StackUpdate | None]
"""The update of a group in so many turns, or in one for each row; None where that cannot be."""


def _as_whole(turns: int | None) -> None:
    """Of a group that has no other update."""


def _in_turns(groups: Sequence[_Group], updates: Sequence[_Update]) -> dict[int, StackUpdate]:
    """By position the updates of groups of stacks, and of what has more bytes than a layer of any of those."""
    found = {place: stack for place, update in enumerate(updates) if (stack := update(None))}
    if not found:
        return {}
    largest = max(found.values(), key=lambda stack: stack.turn_bytes)
    for place, (group, update) in enumerate(zip(groups, updates, strict=True)):
        if place not in found and group.size_bytes > largest.turn_bytes and (pieces := update(largest.turns)):
            found[place] = pieces
    return dict(sorted(found.items()))


def _once(awaited: Sequence, values: Mapping[Any, Any]) -> dict:
    """The ``values`` once what is ``awaited`` is there."""
    waiting, _ = lax.optimization_barrier((list(values.values()), awaited)) if values else ([], None)
    return dict(zip(values, waiting, strict=True))


def _as_if_here(jaxpr: Any, leaves: Sequence[int], results: Collection[int]) -> tuple[Any, dict]:
    """``jaxpr`` without the copies of whole ``leaves`` that are on the host already, and of ``results`` to there.

    Returns:
      It, and for the variable of such a leaf that of its value on the device, which is left to be made.
    """
    away = {jaxpr.invars[place] for place in leaves if is_on_host(jaxpr.invars[place])}
    made = {jaxpr.outvars[place] for place in results}
    fetches = [eqn for eqn in jaxpr.eqns if is_fetch(eqn) and eqn.invars[0] in away]
    offloads = [eqn for eqn in jaxpr.eqns if is_offload(eqn) and eqn.outvars[0] in made]
    fetched = {eqn.invars[0]: eqn.outvars[0] for eqn in reversed(fetches)}
    same = {eqn.outvars[0]: fetched[eqn.invars[0]] for eqn in fetches}
    same |= {eqn.outvars[0]: renamed(eqn.invars[0], same) for eqn in offloads}
    gone = {id(eqn) for eqn in (*fetches, *offloads)}
    eqns = [with_renamed_operands(eqn, same) for eqn in jaxpr.eqns if id(eqn) not in gone]
    outvars = [renamed(atom, fetched if place in results else same) for place, atom in enumerate(jaxpr.outvars)]
    outvars = [renamed(atom, same) for atom in outvars]
    return (jaxpr.replace(eqns=eqns, outvars=outvars), fetched) if away else (jaxpr, {})


_IN_FLIGHT = 2
"""Groups of the largest size that may be on their way at a time: one comes in while the other goes out."""


def _behind(done: Sequence[tuple[int, list]], room_bytes: int) -> list | None:
    """The last results that have to be there so that what is on its way after them has room; None if all has.

    Args:
      done: bytes and results, in order.
    """
    for size, results in reversed(done):
        room_bytes -= size
        if room_bytes < 0:
            return results
    return None


@dataclass(frozen=True)
class _Group:
    """Leaves that one value is made of.

    Attributes:
      eqns: that read one of them, or what is made of it.
    """

    leaves: tuple
    eqns: tuple

    @property
    def size_bytes(self) -> int:
        return sum(map(size_bytes, self.leaves))

    def gradients(self, jaxpr: Any) -> list:
        """What the arrays that its equations read are made of, element by element: before any norm scales them."""
        wanted, found = {var for var in free_variables(self.eqns, ()) if var not in self.leaves}, []
        for eqn in reversed(jaxpr.eqns):
            made = [var for var in eqn.outvars if var in wanted and var.aval.shape]
            if made and is_elementwise(eqn, made[0].aval.shape):
                wanted |= {*variables(eqn.invars)}
            else:
                found += made
        return found


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
