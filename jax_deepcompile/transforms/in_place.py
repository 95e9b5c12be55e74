"""Which stacks a pipelined loop writes in the memory of stacks that it reads, and in which order.

XLA writes a stack in place where what depends on what says that nothing may still have to read it, and where all want
its dimensions in the same order; else it copies all of it, in every iteration. So what is written waits for what the
iteration makes of the same stack. What is on the host is copied here and back in one iteration, some of it each way at
a time: of these stacks a layer comes in the first half, and another one goes in the second, of those it is the other
way round.

Guarantees: values are bitwise the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from jax import lax

from jax_deepcompile._jax_compat import open_jaxpr
from jax_deepcompile.analysis.dataflow import needed_for, variables
from jax_deepcompile.analysis.loops import Loop
from jax_deepcompile.analysis.parts import Part, SplitBody
from jax_deepcompile.analysis.work import is_anchor, work_of
from jax_deepcompile.ir.memory import is_fetch, is_on_host, size_bytes
from jax_deepcompile.ir.primitives import PRODUCTS
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.retrace import compute, read
from jax_deepcompile.ir.traversal import reached_from


def succeeded(program: Program, loop: Loop) -> dict[int, int]:
    """Positions, among the stacks whose slices ``loop`` reads, of the state that what it stacks up succeeds; with the
    positions of that among the stacked outputs."""
    jaxpr, scan = open_jaxpr(program.jaxpr), loop.scan
    pairs = [(jaxpr.invars[before], jaxpr.outvars[after]) for before, after in program.state_outputs]
    xs, ys = scan.operands.xs, scan.results.ys
    return {xs.index(before): ys.index(after) for before, after in pairs if before in xs and after in ys}


@dataclass(frozen=True)
class InPlace:
    """Outputs of a loop in the memory of what it reads.

    Attributes:
      split: its body.
      outputs: positions among the stacked outputs, by the variable that is a slice of the stack whose memory they take.
      state: of them those that succeed state; of that other parts of the body may read slices, too.
    """

    split: SplitBody
    outputs: Mapping[Any, int]
    state: frozenset[int]

    @classmethod
    def of(cls, loop: Loop, split: SplitBody, succeeded: Mapping[int, int]) -> InPlace:
        """
        Args:
          succeeded: as the function of that name has it. What is written before ``late`` reads it is no such state.
        """
        outputs, state = {var: output for output, var in split.in_place}, set[int]()
        for place, output in succeeded.items():
            var, is_late = loop.slices[place], output in split.late_outputs
            if var not in outputs and output not in outputs.values() and (is_late or var not in split.late.inputs):
                outputs[var] = output
                state.add(output)
        return cls(split, outputs, frozenset(state))

    def once_read(self, output: int, value: Any, carry: Sequence, gathered: Sequence) -> Any:
        """The ``value`` of an output in ``state`` once the iteration has read the stack that it succeeds.

        Args:
          carry: that the iteration made.
          gathered: what it gathered, or fetched, for a later one.
        """
        return once(value, self._made_of(output, carry, gathered))

    def computed(self, main: Part, known: Callable[[Any], Any], gathered: Sequence) -> tuple[list, list]:
        """What ``main`` makes; and of what it computes, if state goes to the host, that which is there halfway.

        Args:
          known: the value of a variable that it reads.
          gathered: what the iteration gathered, or fetched, for a later one.
        """
        eqns, values = main.jaxpr.eqns, {var: known(var) for var in main.inputs}
        products = [eqn for eqn in eqns if eqn.primitive.name in PRODUCTS and is_anchor(eqn)]
        halfway = []
        if self._first and products:
            done = list(accumulate(work_of(eqn).flops for eqn in products))
            middle = products[bisect_left(done, done[-1] / 2)]
            values = compute(eqns[: eqns.index(middle) + 1], values)
            coming = (value for output in self._first for value in self._made_of(output, (), gathered))
            halfway = [once(values[middle.outvars[0]], coming)]
            values[middle.outvars[0]] = halfway[0]
            eqns = eqns[eqns.index(middle) + 1 :]
        values = compute(eqns, values)
        return [read(atom, values) for atom in main.jaxpr.outvars], halfway

    def sent(self, pending: Sequence, halfway: Sequence) -> list:
        """What is ``pending``, once the iteration is ``halfway`` if it goes to the host and its like came before: the
        copy and the write are one there, and wait together."""
        going = {var for output in self._first for var in self._late_reads(output)}
        pairs = zip(self.split.pending, pending, strict=True)
        return [once(value, halfway) if var in going else value for var, value in pairs]

    @cached_property
    def fetched_last(self) -> frozenset:
        """What ``early`` makes once the stacks that it is of are written: about half of what comes from the host."""
        early, last = self.split.early, set(self._sent) - set(self._first)
        stacks = {var for var, output in self.outputs.items() if output in last}
        others = reached_from(early.jaxpr.eqns, {*early.inputs} - stacks)
        return frozenset(reached_from(early.jaxpr.eqns, stacks).intersection(early.outputs) - others)

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """Those of ``_sent`` of which a layer comes before another one goes: as much as comes later, when whatever else
        is on the host comes, too."""
        sizes = {output: size_bytes(var) for var, output in self.outputs.items() if output in self._sent}
        fetched = sum(size_bytes(eqn.outvars[0]) for eqn in self.split.early.jaxpr.eqns if is_fetch(eqn))
        first, later_bytes = [], sum(sizes.values()) - fetched / 2
        for output in sorted(sizes, key=lambda output: -sizes[output]):
            if sizes[output] <= later_bytes:
                later_bytes -= sizes[output]
            else:
                first.append(output)
        return tuple(first)

    @cached_property
    def _sent(self) -> tuple[int, ...]:
        """Those of the state that go to the host."""
        made = zip(self.split.late_outputs, self.split.late.outputs, strict=True)
        return tuple(output for output, atom in made if output in self.state and is_on_host(atom))

    def _late_reads(self, output: int) -> set:
        late = self.split.late
        made = late.outputs[self.split.late_outputs.index(output)]
        return {var for eqn in needed_for(late.jaxpr.eqns, [made]) for var in variables(eqn.invars)}

    def _made_of(self, output: int, carry: Sequence, gathered: Sequence) -> Iterator[Any]:
        """What is made of the stack that ``output`` succeeds."""
        stack = {var for var, place in self.outputs.items() if place == output}
        for part, values in ((self.split.early, gathered), (self.split.main, carry)):
            made = reached_from(part.jaxpr.eqns, stack)
            pairs = zip(part.outputs[: len(values)], values, strict=True)
            yield from (value for var, value in pairs if var in made and value is not None)


def once(value: Any, awaited: Iterator[Any] | Sequence) -> Any:
    """``value`` once each of what is ``awaited`` is there."""
    for other in awaited:
        value, _ = lax.optimization_barrier((value, other))
    return value
