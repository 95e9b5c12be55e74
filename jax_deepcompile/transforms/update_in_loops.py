"""State of layers that is updated in the backward loop, as each layer's gradients are there.

Before::

    g = scan(t): dx = dot(dy, p[t]); g[t] = dot(x, dy)
    m' = f(m, g); p' = h(p, m')

After::

    p', m' = scan(t): dx = dot(dy, p[t]); g = dot(x, dy); m'[t] = f(m[t], g); p'[t] = h(p[t], m'[t])

No stack of gradients is filled, and what of the state is on the host is copied beside the backward pass instead of
after it. That can be where an update is made element by element. Where it reads a scalar of all gradients, such as the
norm that they are clipped by, the loop can run twice::

    g = scan(t): dx = dot(dy, p[t]); g[t] = dot(x, dy)
    s = scale(sum(g * g)); p' = h(p, s * g)

After::

    n = scan(t): dx = dot(dy, p[t]); g = dot(x, dy); n[t] = sum(g * g)
    s = scale(sum(n))
    p' = scan(t): dx = dot(dy, p[t]); g = dot(x, dy); p'[t] = h(p[t], s * g)

Guarantees: values are bitwise the same, but for sums over all layers of a loop that runs twice, which are added up
layer by layer; a pipelined loop (``pipeline_loops``) updates stacks in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax

from jax_deepcompile._jax_compat import bind, eval_local, has_side_effects, open_jaxpr, provenance
from jax_deepcompile.analysis.dataflow import alike, needed_for, variables
from jax_deepcompile.analysis.loops import Loop
from jax_deepcompile.analysis.names import keeping_loop_names, parameter_names, second_run, with_second_run
from jax_deepcompile.ir.memory import DEVICE, HOST
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import compute, read, rescan, trace_blocks
from jax_deepcompile.ir.traversal import free_variables, reached_from
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
      twice: whether the loop runs once before, for scalars that the update reads of all gradients. It is its second
        run that updates, ``layers @update``.
    """

    loop: str
    copied: tuple[str, ...] = ()
    twice: bool = False

    @property
    def updating(self) -> str:
        """What the loop is called that updates."""
        return second_run(self.loop) if self.twice else self.loop

    def describe(self) -> str:
        copied = f", on the host: {', '.join(self.copied)}" if self.copied else ""
        how = "runs twice, for what the update reads of all gradients, and " if self.twice else ""
        return f"{self.loop}: {how}updates the state of a layer as its gradients are there{copied}"

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
        update = LoopUpdate.of(program, loop_named(program, each.loop, "updates state in"), each.twice)
        if update is None:
            how = "by a second run that reads scalars of all gradients" if each.twice else "layer by layer"
            raise refused(f"nothing of the state can be updated in {each.loop!r} {how}")
        known = update.copyable
        places = positions(each.copied, list(known.values()), f"copies in {each.loop!r}")
        after = _updating(program, mesh, update, {list(known)[place] for place in places})
        program = keeping_loop_names(after, program)
        program = with_second_run(program, each.loop) if each.twice else program
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
      twice: whether the loop has to run once before.
    """

    jaxpr: Any
    loop: Loop
    eqns: tuple
    made: Mapping[Any, Any]
    names: Mapping[int, str]
    twice: bool = False

    @classmethod
    def of(cls, program: Program, loop: Loop, twice: bool = False) -> LoopUpdate | None:
        """None where nothing can be updated in ``loop``, or not because it runs ``twice``."""
        if len(loop.path) != 1 or (twice and has_side_effects(loop.eqn)):
            return None
        jaxpr = open_jaxpr(program.jaxpr)
        stacked, after = set(loop.scan.results.ys), reached_from(jaxpr.eqns, set(loop.eqn.outvars))
        elementwise = [eqn for eqn in jaxpr.eqns if _is_of_layers(eqn, loop.length)]
        results = [atom for atom in jaxpr.outvars if variables([atom])]
        found, made, names, known = dict[int, Any](), {}, {}, parameter_names(program)
        needs_all = False
        for place, result in program.state_outputs:
            before, var = jaxpr.invars[place], jaxpr.outvars[result]
            eqns = needed_for(elementwise, [var], effects=False)
            read = set(free_variables(eqns, [var]))
            is_once = results.count(var) == 1 and alike(before, var)
            late = (read & after) - stacked
            if eqns and is_once and read & stacked and not any(var.aval.shape or not twice for var in late):
                needs_all |= bool(late)
                found |= {id(eqn): eqn for eqn in eqns}
                made[var], names[place] = before, known[place]
        eqns = tuple(eqn for eqn in elementwise if id(eqn) in found)
        return cls(jaxpr, loop, eqns, made, names, twice) if made and needs_all == twice else None

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
        read = free_variables(self._around, [*self.reads, *self.jaxpr.outvars])
        return needed_for(self.jaxpr.eqns[: self._place], read)

    @cached_property
    def reductions(self) -> list[Reduction]:
        """What a first run of the loop can reduce of all layers, layer by layer, with no stack of it."""
        if not self.twice:
            return []
        eqns, ys = self.jaxpr.eqns[self._place + 1 :], set(self.loop.scan.results.ys)
        later = {*self.loop.scan.results.carry, *(var for eqn in eqns for var in eqn.outvars)}
        found = (Reduction.of(eqns, eqn, self.loop.length) for eqn in eqns)
        return [each for each in found if each and ys.intersection(each.reads) and later.isdisjoint(each.reads)]

    @property
    def _around(self) -> list:
        """The loop, and the equations after it that are not its update."""
        reducing = (eqn for each in self.reductions for eqn in (*each.eqns, each.eqn))
        return [self.loop.eqn, *reducing, *self.first, *self.left]

    @property
    def _after(self) -> list:
        """The equations after the loop, without what a first run reduces."""
        reduced = {each.eqn.outvars[0] for each in self.reductions}
        return [eqn for eqn in self.jaxpr.eqns[self._place + 1 :] if reduced.isdisjoint(eqn.outvars)]

    @property
    def _place(self) -> int:
        return self.jaxpr.eqns.index(self.loop.eqn)

    @cached_property
    def kept(self) -> tuple:
        """Of the stacked outputs those that anything but the update reads."""
        wanted = set(free_variables([*self.first, *self.left], self.jaxpr.outvars))
        return tuple(var for var in self.loop.scan.results.ys if var in wanted)

    @property
    def dropped(self) -> list:
        """The other ones."""
        return [var for var in self.loop.scan.results.ys if var not in self.kept]

    @cached_property
    def copyable(self) -> dict[int, str]:
        """Of ``names`` those that may be on the host: nothing but the update reads them, or what succeeds them."""
        elsewhere = {atom for eqn in (*self.before, *self._around) for atom in variables(eqn.invars)}
        returned = {*variables(self.jaxpr.outvars)}
        alone = {
            before for made, before in self.made.items() if before not in elsewhere | returned and made not in elsewhere
        }
        return {place: name for place, name in self.names.items() if self.jaxpr.invars[place] in alone}


@dataclass(frozen=True)
class Reduction:
    """Of what is made element by element of stacks, over all layers and more.

    Attributes:
      eqn: that reduces.
      eqns: that make its operand.
    """

    eqn: Any
    eqns: tuple

    @classmethod
    def of(cls, eqns: Sequence, eqn: Any, layers: int) -> Reduction | None:
        """None where ``eqn`` is no such thing; ``eqns`` are all around it."""
        if eqn.primitive.name not in REDUCTIONS or len(eqn.params["axes"]) < 2 or 0 not in eqn.params["axes"]:
            return None
        elementwise = [each for each in eqns if _is_of_layers(each, layers)]
        return cls(eqn, tuple(needed_for(elementwise, eqn.invars, effects=False)))

    @cached_property
    def reads(self) -> list:
        return free_variables(self.eqns, self.eqn.invars)

    def of_layer(self, known: Mapping[Any, Any]) -> Any:
        """What it makes of one layer, of which ``known`` is the operand."""
        (operand,) = self.eqn.invars
        return self._over([axis - 1 for axis in self.eqn.params["axes"] if axis], known[operand])

    def of_all(self, layers: Any) -> Any:
        """What it makes of all, each of which is done."""
        return self._over([0], layers)

    def _over(self, axes: Sequence[int], operand: Any) -> Any:
        (made,) = bind(self.eqn.replace(params={**self.eqn.params, "axes": tuple(axes)}), [operand])
        return made


REDUCTIONS = frozenset({"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"})


def _is_of_layers(eqn: Any, layers: int) -> bool:
    shape = eqn.outvars[0].aval.shape if len(eqn.outvars) == 1 else ()
    return shape[:1] == (layers,) and (is_elementwise(eqn, shape) or _is_filled(eqn))


def _is_filled(eqn: Any) -> bool:
    """Whether a scalar is everywhere in what ``eqn`` makes."""
    return eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape


def _of_layer(eqns: Sequence, known: Mapping[Any, Any]) -> dict:
    """``known`` of one layer, and what ``eqns``, of all layers, make of it."""

    def filled(eqn: Any, operands: list) -> list:
        (made,) = eqn.outvars
        return [lax.full(made.aval.shape[1:], operands[0], made.aval.dtype)]

    return compute(eqns, known, {id(eqn): filled for eqn in eqns if _is_filled(eqn)})


def _updating(program: Program, mesh: AnyMesh, update: LoopUpdate, copied: set[int]) -> Program:
    there = on_host(program, copied)
    jaxpr = update.jaxpr
    away = {jaxpr.invars[place] for place in copied}

    def body(consts: Sequence, *blocks: Any) -> list:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *blocks), strict=True))
        known = compute(update.before, known)
        if update.twice:
            known |= _first_run(update, known)
        known = compute(update.first, known)
        known |= _run(update, known, away)
        ready = {id(eqn) for eqn in update.first}
        known = compute([eqn for eqn in update.left if id(eqn) not in ready], known)
        return [read(atom, known) for atom in jaxpr.outvars]

    return there.replace(jaxpr=trace_blocks(body, there, mesh))


def _run(update: LoopUpdate, known: Mapping[Any, Any], away: set) -> dict:
    """What the loop makes, its update included; of its second run that alone."""
    carry, kept = ((), ()) if update.twice else (update.loop.scan.results.carry, update.kept)

    def made(layer: Mapping[Any, Any]) -> list:
        after = _of_layer(update.eqns, layer)
        succeeding = (
            jax.device_put(after[var], HOST) if before in away else after[var] for var, before in update.made.items()
        )
        return [*(layer[var] for var in kept), *succeeding]

    results, stacked = _rerun(update.loop, known, update.reads, away, made)
    return dict(zip((*carry, *kept, *update.made), (*results[: len(carry)], *stacked), strict=True))


def _first_run(update: LoopUpdate, known: Mapping[Any, Any]) -> dict:
    """What anything but the update needs of the loop."""
    reductions = update.reductions

    def made(layer: Mapping[Any, Any]) -> list:
        reduced = (each.of_layer(_of_layer(each.eqns, layer)) for each in reductions)
        return [*(layer[var] for var in update.kept), *reduced]

    carry, stacked = _rerun(update.loop, known, [var for each in reductions for var in each.reads], set(), made)
    layers = stacked[len(update.kept) :]
    results = dict(zip(update.loop.scan.results.carry, carry, strict=True))
    results |= dict(zip(update.kept, stacked[: len(update.kept)], strict=True))
    return results | {each.eqn.outvars[0]: each.of_all(of) for each, of in zip(reductions, layers, strict=True)}


def _rerun(
    loop: Loop, known: Mapping[Any, Any], reads: Sequence, away: set, made: Callable[[Mapping], list]
) -> tuple[list, list]:
    """The carry of ``loop``, and stacks of what is ``made`` of each layer of what it makes, and of ``reads``.

    Args:
      away: what of those is on the host.
    """
    scan, ys = loop.scan, loop.scan.results.ys
    consts, carry, xs = scan.split([read(atom, known) for atom in loop.eqn.invars])
    own = dict(zip(scan.operands.xs, range(len(xs)), strict=True)) if xs else {}
    others = [var for var in dict.fromkeys(reads) if var.aval.shape and var not in ys and var not in own]
    scalars = {var: known[var] for var in reads if not var.aval.shape}

    def body(carry: list, slices: list) -> list:
        results = scan.split_results(eval_local(scan.closed, [*consts, *carry, *slices[: len(xs)]]))
        layer = scalars | {var: slices[place] for var, place in own.items()}
        coming = zip(others, slices[len(xs) :], strict=True)
        layer |= {var: jax.device_put(value, DEVICE) if var in away else value for var, value in coming}
        layer |= dict(zip(ys, results.ys, strict=True))
        return [*results.carry, *made(layer)]

    with provenance(loop.eqn):
        results = rescan(loop.eqn, body, list(carry), [*xs, *(known[var] for var in others)])
    return results[: len(carry)], results[len(carry) :]
