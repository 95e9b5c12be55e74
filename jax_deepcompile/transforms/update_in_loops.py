"""State of layers that is updated in the backward loop, as each layer's gradients are there.

Before::

    g = scan(t): dx = dot(dy, p[t]); g[t] = dot(x, dy)
    m' = f(m, g); p' = h(p, m')

After::

    p', m' = scan(t): dx = dot(dy, p[t]); g = dot(x, dy); m'[t] = f(m[t], g); p'[t] = h(p[t], m'[t])

No stack of gradients is filled, and what of the state is on the host is copied beside the backward pass instead of
after it. That can be where an update is made element by element: with a norm of all gradients before it, it cannot.

Guarantees: values are bitwise the same; a pipelined loop (``pipeline_loops``) updates stacks in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jax_deepcompile._jax_compat import eval_local, open_jaxpr, provenance
from jax_deepcompile.analysis.dataflow import alike, free_variables, needed_for, reached_from, variables
from jax_deepcompile.analysis.loops import Loop
from jax_deepcompile.analysis.names import keeping_loop_names, parameter_names
from jax_deepcompile.ir.memory import DEVICE, HOST
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import compute, read, rescan, trace_blocks
from jax_deepcompile.transforms.decision import Decision, loop_named, positions, refused
from jax_deepcompile.transforms.offload_state import on_host
from jax_deepcompile.transforms.stack_updates import is_elementwise


@dataclass(frozen=True)
class UpdatedInLoop(Decision, kind="update_in_loops", about=("loop",)):
    """What one loop makes gradients of is updated in it.

    Attributes:
      loop: the loop, such as ``layers @backward``.
      copied: leaves of the state that are on the host, a layer of which is copied to the device and back. Nothing but
        the update may read them, or what succeeds them. That they are there between steps ``offload_state`` says.
    """

    loop: str
    copied: tuple[str, ...] = ()

    def describe(self) -> str:
        copied = f", on the host: {', '.join(self.copied)}" if self.copied else ""
        return f"{self.loop}: updates the state of a layer as its gradients are there{copied}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[UpdatedInLoop]) -> Program:
        return [program, *(after for _, after in in_turn(program, mesh, decisions))][-1]


def in_turn(
    program: Program, mesh: AnyMesh, decisions: Sequence[UpdatedInLoop]
) -> Iterator[tuple[LoopUpdate, Program]]:
    """What each of ``decisions`` updates, of what those before it left, and the program with that.

    Raises:
      PlanError: a loop is not there, or has nothing to update; or what is copied is not updated in it alone.
    """
    for each in decisions:
        update = LoopUpdate.of(program, loop_named(program, each.loop, "updates state in"))
        if update is None:
            raise refused(f"nothing of the state can be updated in {each.loop!r}, layer by layer")
        known = update.copyable
        places = positions(each.copied, list(known.values()), f"copies in {each.loop!r}")
        after = _updating(program, mesh, update, {list(known)[place] for place in places})
        program = keeping_loop_names(after, program)
        yield update, program


@dataclass(frozen=True)
class LoopUpdate:
    """What of the state can be updated in a loop.

    Attributes:
      jaxpr: of the program.
      loop: it; no other loop is around it.
      eqns: outside of it, element by element of stacks, some of what it stacks up.
      made: variables that succeed stacks of the state, each with that stack.
      names: what those stacks are called, by their positions among the inputs of the program.
    """

    jaxpr: Any
    loop: Loop
    eqns: tuple
    made: Mapping[Any, Any]
    names: Mapping[int, str]

    @classmethod
    def of(cls, program: Program, loop: Loop) -> LoopUpdate | None:
        if len(loop.path) != 1:
            return None
        jaxpr = open_jaxpr(program.jaxpr)
        stacked, after = set(loop.scan.results.ys), reached_from(jaxpr.eqns, set(loop.eqn.outvars))
        elementwise = [eqn for eqn in jaxpr.eqns if _is_of_layers(eqn, loop.length)]
        results = [atom for atom in jaxpr.outvars if variables([atom])]
        found, made, names, known = dict[int, Any](), {}, {}, parameter_names(program)
        for place, result in program.state_outputs:
            before, var = jaxpr.invars[place], jaxpr.outvars[result]
            eqns = needed_for(elementwise, [var], effects=False)
            read = set(free_variables(eqns, [var]))
            is_once = results.count(var) == 1 and alike(before, var)
            if eqns and is_once and read & stacked and not (read & after) - stacked:
                found |= {id(eqn): eqn for eqn in eqns}
                made[var], names[place] = before, known[place]
        eqns = tuple(eqn for eqn in elementwise if id(eqn) in found)
        return cls(jaxpr, loop, eqns, made, names) if made else None

    @cached_property
    def reads(self) -> list:
        """Stacks, whole and a layer at a time; scalars."""
        return free_variables(self.eqns, self.made)

    @cached_property
    def left(self) -> list:
        """The other equations after the loop that results need."""
        others = [eqn for eqn in self._after if self.made.keys().isdisjoint(eqn.outvars)]
        return needed_for(others, [var for var in variables(self.jaxpr.outvars) if var not in self.made])

    @cached_property
    def first(self) -> list:
        """The equations after the loop that make what the update reads besides what the loop makes."""
        return needed_for(self._after, set(self.reads) - set(self.loop.scan.results.ys), effects=False)

    @cached_property
    def before(self) -> list:
        """The equations before the loop that anything needs."""
        read = free_variables([self.loop.eqn, *self.first, *self.left], [*self.reads, *self.jaxpr.outvars])
        return needed_for(self.jaxpr.eqns[: self._place], read)

    @property
    def _after(self) -> list:
        return self.jaxpr.eqns[self._place + 1 :]

    @property
    def _place(self) -> int:
        return self.jaxpr.eqns.index(self.loop.eqn)

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Positions, among the stacked outputs, of those that only the update reads."""
        wanted = set(free_variables(self.left, self.jaxpr.outvars))
        ys = self.loop.scan.results.ys
        return frozenset(place for place, var in enumerate(ys) if var in self.reads and var not in wanted)

    @cached_property
    def copyable(self) -> dict[int, str]:
        """Of ``names`` those that may be on the host: nothing but the update reads them, or what succeeds them."""
        around = [*self.before, self.loop.eqn, *self.first, *self.left]
        elsewhere = {atom for eqn in around for atom in variables(eqn.invars)}
        returned = {*variables(self.jaxpr.outvars)}
        alone = {
            before for made, before in self.made.items() if before not in elsewhere | returned and made not in elsewhere
        }
        return {place: name for place, name in self.names.items() if self.jaxpr.invars[place] in alone}


def _is_of_layers(eqn: Any, layers: int) -> bool:
    shape = eqn.outvars[0].aval.shape if len(eqn.outvars) == 1 else ()
    return shape[:1] == (layers,) and is_elementwise(eqn, shape)


def _updating(program: Program, mesh: AnyMesh, update: LoopUpdate, copied: set[int]) -> Program:
    there = on_host(program, copied)
    jaxpr = update.jaxpr
    away = {jaxpr.invars[place] for place in copied}

    def body(consts: Sequence, *blocks: Any) -> list:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *blocks), strict=True))
        known = compute(update.before, known)
        known = compute(update.first, known)
        known |= _run(update, known, away)
        ready = {id(eqn) for eqn in update.first}
        known = compute([eqn for eqn in update.left if id(eqn) not in ready], known)
        return [read(atom, known) for atom in jaxpr.outvars]

    return there.replace(jaxpr=trace_blocks(body, there, mesh))


def _run(update: LoopUpdate, known: Mapping[Any, Any], away: set) -> dict:
    """What the loop makes, its update included."""
    scan, stacked = update.loop.scan, set(update.loop.scan.results.ys)
    consts, carry, xs = scan.split([read(atom, known) for atom in update.loop.eqn.invars])
    own = dict(zip(scan.operands.xs, range(len(xs)), strict=True)) if xs else {}
    others = [var for var in update.reads if var.aval.shape and var not in stacked and var not in own]
    more = [known[var] for var in others]
    scalars = {var: known[var] for var in update.reads if not var.aval.shape}
    kept = [place for place in range(len(scan.results.ys)) if place not in update.dropped]

    def body(carry: list, slices: list) -> list:
        made = scan.split_results(eval_local(scan.closed, [*consts, *carry, *slices[: len(xs)]]))
        layer = scalars | {var: slices[place] for var, place in own.items()}
        coming = zip(others, slices[len(xs) :], strict=True)
        layer |= {var: jax.device_put(value, DEVICE) if var in away else value for var, value in coming}
        layer |= dict(zip(scan.results.ys, made.ys, strict=True))
        after = compute(update.eqns, layer)
        succeeding = [
            jax.device_put(after[var], HOST) if before in away else after[var] for var, before in update.made.items()
        ]
        return [*made.carry, *(made.ys[place] for place in kept), *succeeding]

    with provenance(update.loop.eqn):
        results = rescan(update.loop.eqn, body, list(carry), [*xs, *more])
    outer = [*scan.results.carry, *(scan.results.ys[place] for place in kept), *update.made]
    return dict(zip(outer, results, strict=True))
