"""Layer loops that communicate for their neighbours while they compute.

A layer loop that gathers a layer's parameters, computes, and reduces the layer's gradients leaves both collectives
exposed: XLA overlaps what is inside one iteration of a loop, and there the gather comes first and the reduction last.
In the pipelined loop an iteration gathers for the layer ``prefetch_layers`` ahead and reduces for the layer
``delay_layers`` behind, so both have a layer's compute to hide under.

Before::

    scan(t): W = all_gather(w[t]); y, p = layer(y, W); g[t] = reduce_scatter(p)

After, with one layer of each (``first`` iterations before the loop, ``last`` after it)::

    W = all_gather(w[0]); V = all_gather(w[1]); y, p = layer(y, W)
    scan(t): W = all_gather(w[t + 1]); g[t - 1] = reduce_scatter(p); y, p = layer(y, V)
    g[n - 2] = reduce_scatter(p); y, p = layer(y, W); g[n - 1] = reduce_scatter(p)

In the loop a product that makes a ``p`` waits until the ``g`` two layers before is written: two layers' take turns then
in the same memory, and nothing is copied from one iteration to the next.

Guarantees: every layer is gathered and reduced exactly as often as before, values are bitwise those of the plain loop,
stacks are read and written in place, by index; a stack that an output is added to, or state that it succeeds, is that
output's buffer (``in_place``). Peeled iterations run as code outside of loops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jax_deepcompile._jax_compat import eval_local
from jax_deepcompile.analysis.dataflow import needed_for
from jax_deepcompile.analysis.loops import Loop, constants_of, find_loops
from jax_deepcompile.analysis.parts import Part, SplitBody, split_body
from jax_deepcompile.ir.memory import HOST, is_on_host
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import Scan
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import Compute, compute
from jax_deepcompile.ir.rewrite import without_barriers
from jax_deepcompile.ir.traversal import free_variables, reached_from
from jax_deepcompile.transforms.decision import Decision, loop_named, refused, replace_loops
from jax_deepcompile.transforms.in_place import InPlace, once, succeeded


@dataclass(frozen=True)
class LoopSchedule(Decision, kind="pipeline_loops", about=("loop",)):
    """How one layer loop is pipelined.

    Attributes:
      loop: the loop, such as ``layers @backward``.
      prefetch_layers: how many iterations ahead a layer's parameters are gathered; 0 gathers in the layer's own.
      delay_layers: how many iterations later a layer's gradients are reduced; 0 reduces in the layer's own.
      first_layers: iterations peeled off the front.
      last_layers: iterations peeled off the end.
    """

    loop: str
    prefetch_layers: int = 1
    delay_layers: int = 1
    first_layers: int = 0
    last_layers: int = 0

    def check(self, program: Program) -> None:
        loop_named(program, self.loop, "pipelines")
        for layers in (self.prefetch_layers, self.delay_layers, self.first_layers, self.last_layers):
            if not 0 <= layers <= _MOST_LAYERS:
                raise refused(f"it pipelines {self.loop!r} by {layers} layers")

    def describe(self) -> str:
        parts = [f"gathers {_layers(self.prefetch_layers, 'a ')} ahead"] * bool(self.prefetch_layers)
        parts += [f"reduces {_layers(self.delay_layers, 'a ')} behind"] * bool(self.delay_layers)
        parts += [f"runs its first {_layers(self.first_layers)} apart"] * bool(self.first_layers)
        parts += [f"runs its last {_layers(self.last_layers)} apart"] * bool(self.last_layers)
        return f"{self.loop}: {', '.join(parts) or 'runs as it is, stacks by index'}"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[LoopSchedule]) -> Program:
        divided = len(mesh.axis_names) > len(program.mesh.devices.names)
        wanted = {each.loop: each for each in decisions}
        kept = {loop.name: succeeded(program, loop) for loop in find_loops(program) if loop.name in wanted}
        ways = {name: lambda loop: _Pipeline.of(loop, wanted[loop.name], divided, kept[loop.name]) for name in wanted}
        return replace_loops(program, mesh, ways)


_MOST_LAYERS = 64
"""Iterations ahead, behind or apart: each is code of its own, and planning chooses 1 or 2."""


def _layers(count: int, one: str = "") -> str:
    return f"{one}layer" if count == 1 else f"{count} layers"


def choose_schedules(program: Program) -> tuple[LoopSchedule, ...]:
    """A schedule for every loop over layers: one that gathers slices of stacks, or reduces what nobody in it reads.

    A loop that gathers the same in every iteration, as one over microbatches does, has nothing to gain from a longer
    body.
    """
    chosen = []
    for loop in find_loops(program):
        split = split_body(loop.eqn)
        ahead = 1 if set(split.early.inputs) & set(loop.slices) else 0
        behind = 1 if split.late_outputs else 0
        if 0 < max(ahead, behind) < loop.length:
            chosen.append(LoopSchedule(loop.name, ahead, behind, behind, ahead))
    return tuple(chosen)


class _State(NamedTuple):
    """What flows from one iteration to the next.

    Attributes:
      gathered: what was gathered for the coming iterations, nearest first.
      pending: what waits to be reduced, oldest first.
    """

    carry: Sequence
    gathered: tuple
    pending: tuple
    stacks: tuple


@dataclass(frozen=True)
class _Pipeline:
    """The pipelined form of one loop: the pieces of its body, ready to run for any iteration.

    Attributes:
      divided: whether XLA divides what is in it further, along automatic axes.
      consts: the loop's constants by variable of the body.
      slices: the stacks whose slices the body reads, by variable of the body.
      in_place: the outputs that are written in the memory of what the body reads.
    """

    loop: Loop
    schedule: LoopSchedule
    divided: bool
    split: SplitBody
    consts: dict
    slices: dict
    in_place: InPlace

    @classmethod
    def of(cls, loop: Loop, schedule: LoopSchedule, divided: bool, succeeded: Mapping[int, int]) -> Compute:
        split = split_body(loop.eqn)
        in_place = InPlace.of(loop, split, succeeded)

        def run(eqn, operands: list) -> Sequence:
            scan = Scan(eqn)
            consts, carry, stacks = scan.split(operands)
            slices = dict(zip(loop.slices, stacks, strict=True))
            known = constants_of(eqn) | dict(zip(scan.inputs.consts, consts, strict=True))
            begin = jnp.zeros if divided else lax.empty  # XLA divides zeros, and not what is left undefined
            outs = [_in_memory_of(var, begin(var.aval.shape, var.aval.dtype)) for var in scan.results.ys]
            for var, output in in_place.outputs.items():
                outs[output] = slices.pop(var)
            return cls(loop, schedule, divided, split, known, slices, in_place).run(carry, tuple(outs))

        return run

    @property
    def carried(self) -> Sequence:
        """The body's variables for the carry."""
        return self.loop.scan.inputs.carry

    @property
    def first(self) -> int:
        """Iterations that run apart before the loop."""
        return min(max(self.schedule.first_layers, self.schedule.delay_layers), self.loop.length)

    def run(self, carry: Sequence, stacks: tuple) -> Sequence:
        length, first = self.loop.length, self.first
        last = min(max(self.schedule.last_layers, self.schedule.prefetch_layers), length - first)
        gathered = tuple(self.gather(t, stacks) for t in range(min(self.schedule.prefetch_layers, length)))
        state = _State(carry, gathered, (), stacks)
        for t in range(first):
            state = self.iteration(state, t)
        if trips := length - first - last:

            def body(counted, _):
                t, state = counted
                return (t + 1, self.iteration(state, t)), None

            (_, state), _ = lax.scan(body, (jnp.int32(first), state), length=trips)
        for t in range(length - last, length):
            state = self.iteration(state, t)
        for t in range(length - len(state.pending), length):
            state = self.reduce_oldest(state, t)
        written = list(state.stacks)
        for index in self.split.late_outputs:  # XLA would put the last writes off into what reads it, slowing that
            written[index] = lax.optimization_barrier(written[index])
        return [*state.carry, *written]

    def gather(self, t, stacks: tuple, wanted: Collection | None = None) -> list:
        """What ``early`` makes for iteration ``t``; None for what is not ``wanted``, where only some is."""
        read, early = self._reader(t, stacks), self.split.early
        if wanted is None:
            return self._run(early, lambda var: self._as_outside(read(var), reached_from(early.jaxpr.eqns, {var})))
        eqns = needed_for(early.jaxpr.eqns, wanted)
        inputs = free_variables(eqns, wanted)
        known = compute(eqns, {var: self._as_outside(read(var), reached_from(eqns, {var})) for var in inputs})
        return [known[var] if var in wanted else None for var in early.outputs]

    def iteration(self, state: _State, t) -> _State:
        """Iteration ``t``: gathers for a later one, reduces for an earlier one, and computes its own layer.

        Apart from the loop nothing would keep XLA from putting all gradients and reductions off to the very end, so
        there the next iteration waits for this one's, as it does in a loop.
        """
        schedule, split, apart = self.schedule, self.split, isinstance(t, int)
        gathered, pending, stacks, reduced = state.gathered, state.pending, state.stacks, {}
        reduces = schedule.delay_layers and len(pending) == schedule.delay_layers
        gathers = not apart or t + schedule.prefetch_layers < self.loop.length
        if gathers:
            gathered = (*gathered, self.gather(t + schedule.prefetch_layers, stacks, self._fetched_first))
        between = apart and 0 < t < self.first
        made = self._given(state, t) if between else dict(zip(self.carried, state.carry, strict=True))
        ready = map(self._in_order, gathered[0]) if apart else gathered[0]
        made |= dict(zip(split.early.outputs, ready, strict=True))
        ahead = gathered[-1] if gathered else ()
        results, halfway = self.in_place.computed(self._main(t), self._reader(t, stacks, made), ahead)
        count = len(self.carried) + len(stacks) - len(split.late_outputs)
        carry, rest = results[: len(self.carried)], results[len(self.carried) : count]
        made |= dict(zip(split.main.outputs[count:], results[count:], strict=True))
        gradients, stacks = self._gradients(made, stacks, t, wait=bool(reduces and not apart))
        left = tuple(self._in_a_row((made | gradients)[var]) for var in split.pending)
        if reduces:
            oldest, pending = self.in_place.sent(pending[0], halfway), pending[1:]
            reduced = self._reduced(oldest, stacks, t - schedule.delay_layers)
            reduced = {index: self._once_read(index, value, carry, ahead) for index, value in reduced.items()}
        if reduces and apart:  # a copy to the host, and where it goes in a stack there, are one
            here = {index: value for index, value in reduced.items() if not is_on_host(value)}
            carry, rest, left, here = lax.optimization_barrier((carry, rest, left, here))
            reduced |= here
        early = [index for index in range(len(stacks)) if index not in split.late_outputs]
        now = {index: self._once_read(index, value, carry, ahead) for index, value in zip(early, rest, strict=True)}
        stacks = self._stored(stacks, t - schedule.delay_layers, reduced)
        stacks = self._stored(stacks, t, now)
        if gathers and self._fetched_last:
            later = t + schedule.prefetch_layers
            made = self.gather(later if apart else once(later, halfway), stacks, self._fetched_last)
            gathered = (*gathered[:-1], [a if b is None else b for a, b in zip(gathered[-1], made, strict=True)])
        state = _State(carry, gathered[1:], (*pending, left), stacks)
        return state if schedule.delay_layers else self.reduce_oldest(state, t)

    def _main(self, t) -> Part:
        """What iteration ``t`` computes: in the first one of a loop that reduces, what was just computed is at hand."""
        main = self.split.main
        if isinstance(t, int) and t == 0 and self.schedule.delay_layers:
            return replace(main, jaxpr=without_barriers(main.jaxpr))
        return main

    @cached_property
    def _fetched_last(self) -> frozenset:
        """What is fetched once an iteration has sent what is in its place."""
        is_pipelined = self.schedule.prefetch_layers and self.schedule.delay_layers
        return self.in_place.fetched_last if is_pipelined else frozenset()

    @cached_property
    def _fetched_first(self) -> frozenset | None:
        """What is gathered and fetched before that; None where that is all."""
        return frozenset(self.split.early.outputs) - self._fetched_last if self._fetched_last else None

    def _once_read(self, output: int, value: Any, carry: Sequence, ahead: Sequence) -> Any:
        """``value``, of state that ``output`` succeeds, once that is read; what is on the host waited before."""
        if output not in self.in_place.state or is_on_host(value):
            return value
        return self.in_place.once_read(output, self._in_order(value), carry, ahead)

    def _given(self, state: _State, t: int) -> dict:
        """What iteration ``t`` reads besides parameters: slices of stacks are there for it when the carry is.

        XLA would compute again early, and keep, what many checkpointed layers make of them.
        """
        read = [var for var in self.split.main.inputs if var in self.slices or var in self.in_place.outputs]
        slices = map(self._reader(t, state.stacks), read)
        carry, values = lax.optimization_barrier((state.carry, list(slices)))
        return dict(zip((*self.carried, *read), (*carry, *values), strict=True))

    def _gradients(self, made: dict, stacks: tuple, t, wait: bool) -> tuple[dict, tuple]:
        """What iteration ``t`` leaves to be reduced; and the stacks.

        Args:
          wait: whether each is made once the stacks that it will be reduced for are written, so that the memory of an
            earlier one is free for it.
        """
        gradients: dict = {}
        for gradient in self.split.gradients:
            operands = [made[var] for var in gradient.operands]
            if wait:
                operands, stacks = _after(operands, stacks, gradient.outputs)
            given = made | dict(zip(gradient.operands, operands, strict=True))
            values = self._run(gradient.part, self._reader(t, stacks, given))
            gradients |= dict(zip(gradient.part.outputs, values, strict=True))
        return gradients, stacks

    def _in_a_row(self, value):
        """So XLA has it in memory as the reduction wants it; what it divides further cannot be put in a row."""
        return value if self.divided else value.reshape(-1)

    def reduce_oldest(self, state: _State, t) -> _State:
        """Finishes the outputs of iteration ``t``, the oldest that is pending."""
        stacks = self._stored(state.stacks, t, self._reduced(state.pending[0], state.stacks, t))
        return _State(state.carry, state.gathered, state.pending[1:], stacks)

    def _reduced(self, pending: Sequence, stacks: tuple, t) -> dict[int, Any]:
        """The outputs, by position, that iteration ``t`` left ``pending``."""
        split = self.split
        made = {var: value.reshape(var.aval.shape) for var, value in zip(split.pending, pending, strict=True)}
        reduced = {}
        values = self._run(split.late, self._reader(t, stacks, made))
        for output, atom, value in zip(split.late_outputs, split.late.outputs, values, strict=True):
            made_of = {var for eqn in needed_for(split.late.jaxpr.eqns, [atom]) for var in eqn.outvars}
            reduced[output] = self._as_outside(value, made_of)
        return reduced

    def _as_outside(self, value, related: Collection):
        """A slice of a stack in memory as the stack is outside of the loop, if it is transposed for a collective.

        XLA would rather have whole stacks as the collective wants a slice, and transpose them outside of the loop. What
        is made of the slice, or it is made of, is ``related``.
        """
        split = self.split
        eqns = (eqn for part in (split.early, split.late) for eqn in part.jaxpr.eqns)
        turned = any(eqn.primitive.name == "transpose" and eqn.outvars[0] in related for eqn in eqns)
        return self._in_order(value) if turned else value

    def _in_order(self, value):
        """``value`` with its dimensions in memory in their order, as the loop has what it carries.

        Apart from the loop XLA would transpose what products read.
        """
        if self.divided:
            return value
        return with_layout_constraint(value, Layout(tuple(range(value.ndim))))

    def _stored(self, stacks: tuple, t, values: dict[int, Any]) -> tuple:
        layer = self._layer(t)
        return tuple(
            _updated(stack, values[index], layer) if index in values else stack for index, stack in enumerate(stacks)
        )

    def _layer(self, t):
        loop = self.loop
        return loop.length - 1 - t if loop.reverse else t

    def _reader(self, t, stacks: tuple, made: Mapping = MappingProxyType({})) -> Callable:
        def read(var):
            if var in made:
                return made[var]
            if var in self.consts:
                return self.consts[var]
            if var in self.slices:
                return self._slice(self.slices[var], t)
            output = self.in_place.outputs[var]
            value = self._slice(stacks[output], t)
            return self._in_order(value) if output in self.in_place.state and not is_on_host(value) else value

        return read

    def _slice(self, stack, t):
        layer = self._layer(t)
        if isinstance(layer, int):
            return lax.index_in_dim(stack, layer, keepdims=False)
        return lax.dynamic_index_in_dim(stack, layer, keepdims=False)

    def _run(self, part: Part, read: Callable) -> list:
        return eval_local(part.jaxpr, [read(var) for var in part.inputs])


def _in_memory_of(var: Any, value: Any) -> Any:
    return jax.device_put(value, HOST) if is_on_host(var) else value


def _updated(stack, value, layer):
    """``stack`` with ``value`` as its slice number ``layer``; as a literal where that is known."""
    if isinstance(layer, int):
        return lax.dynamic_update_slice(stack, value[None], (layer,) + (0,) * value.ndim)
    return lax.dynamic_update_index_in_dim(stack, value, layer, 0)


def _after(values: list, stacks: tuple, places: Sequence[int]) -> tuple[list, tuple]:
    """``values`` once those of ``stacks`` at ``places`` are written; and the stacks."""
    values, written = lax.optimization_barrier((values, [stacks[place] for place in places]))
    known = dict(zip(places, written, strict=True))
    return values, tuple(known.get(place, stack) for place, stack in enumerate(stacks))
