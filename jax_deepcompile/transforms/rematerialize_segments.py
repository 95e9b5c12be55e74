"""What backward reads of forward where no loop runs the layers, computed again instead, as if blocks were checkpointed.

Before::

    h1 = dot(x, W1); y1 = gelu(h1); h2 = dot(y1, W2); y2 = gelu(h2)
    ... h2 ...; g = dot(dh2, W2); ... h1 ...

After, where ``y1`` is kept::

    h1 = dot(x, W1); y1 = gelu(h1); h2 = dot(y1, W2); y2 = gelu(h2)
    ... h2 ...; g = dot(dh2, W2); h1' = dot(barrier(x, g), W1); ... h1' ...

A segment is all that hangs together, of one pass, between kept values. All of it that backward reads is computed
again where backward first reads something of it, once the products of the segment before are there: XLA would do those
last, and hold all they read. The last one is not: backward begins with it. Parameters that backward gathers anyway are
gathered once.

Guarantees: what is computed again is the value that was kept; a segment waits for the gradient that comes to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from scipy.cluster.hierarchy import DisjointSet

from jax_deepcompile._jax_compat import is_drop_var, new_barrier, new_var, open_jaxpr, rematted
from jax_deepcompile.analysis.dataflow import slim_barriers
from jax_deepcompile.analysis.equal_work import Numbers
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.names import value_names
from jax_deepcompile.analysis.segments import Tape, has_numbers, segment_inputs
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.primitives import PRODUCTS
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import renamed, with_renamed_operands
from jax_deepcompile.ir.traversal import variables
from jax_deepcompile.transforms.decision import Decision, listed, positions, replace_bodies


@dataclass(frozen=True)
class RematerializedSegments(Decision, kind="rematerialize_segments", after=("rematerialize",), about=("where",)):
    """Backward computes again what it reads of forward, a segment at a time.

    Attributes:
      where: the loop whose iterations have forward and backward, as those over microbatches do; empty for what is
        outside of loops.
      inputs: what is kept, by the scope that computes it: what a segment reads of those before it.
      with_loops: whether segments have loops in them, of which each is computed again as a whole.
    """

    where: str
    inputs: tuple[str, ...]
    with_loops: bool = False

    def describe(self) -> str:
        where, loops = self.where or "outside of loops", ", with the loops inside" * self.with_loops
        return f"{where}: backward computes again what it reads, from {listed(self.inputs, self.where)}{loops}"

    @property
    def segments(self) -> int:
        """How many are computed again, at most."""
        return len(self.inputs)

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[RematerializedSegments]) -> Program:
        choices = {each.where: each for each in decisions}

        def again(jaxpr: Any, where: str) -> Any:
            return _computed_again(jaxpr, choices[where])

        return replace_bodies(program, mesh, choices, "computes segments again of", again)


def segments_of(
    program: Program, with_loops: bool = False, on_host: bool = False
) -> Iterator[tuple[RematerializedSegments, tuple[str, ...]]]:
    """What would save most memory, outside of loops and in each loop, and the names of what is not kept then.

    Args:
      with_loops: as of the decision.
      on_host: what segments are given is on the host meanwhile.
    """
    bodies = {"": program.jaxpr} | {loop.name: loop.scan.closed for loop in find_loops(program)}
    for where, jaxpr in bodies.items():
        flat = open_jaxpr(jaxpr)
        tape, names = Tape(flat, with_loops), value_names(flat, phased=not where)
        if inputs := segment_inputs(tape, on_host):
            choice = RematerializedSegments(where, tuple(names[var] for var in inputs), with_loops)
            yield choice, tuple(names[var] for var in tape.before(inputs))


def _computed_again(jaxpr: Any, choice: RematerializedSegments) -> Any:
    flat, where = open_jaxpr(jaxpr), choice.where
    tape = Tape(flat, choice.with_loops)
    known = {name: var for var, name in value_names(flat, phased=not where).items() if var in tape.makers}
    what = f"computes again what {where!r} makes from" if where else "computes again, outside of loops, from"
    kept = [list(known.values())[place] for place in positions(choice.inputs, list(known), what)]
    return _Again(tape, frozenset(kept)).result()


@dataclass
class _Again:
    """A jaxpr in which segments are computed again.

    Attributes:
      kept: what is not computed again.
      again: what backward reads in the place of what forward made.
      merged: likewise, of what it makes itself of parameters.
      gathered: what segments made of parameters, by number.
    """

    tape: Tape
    kept: frozenset
    again: dict = field(default_factory=dict)
    merged: dict = field(default_factory=dict)
    gathered: dict[int, Any] = field(default_factory=dict)

    @cached_property
    def _numbers(self) -> Mapping[Any, int]:
        return Numbers().of_place(self.tape.jaxpr)

    def result(self) -> Any:
        tape, flat = self.tape, self.tape.jaxpr
        waiting = _segments(tape, self.kept)
        readers, made, eqns = set(tape.readers), dict[Any, None](), list[Any]()
        products: list[Any] = []
        for place, eqn in enumerate(flat.eqns):
            eqn = with_renamed_operands(eqn, self.merged)
            if place in readers:
                sources = {atom: renamed(atom, tape.guarded) for atom in variables(eqn.invars)}
                for source in sources.values():
                    if segment := waiting.get(source):
                        own = [atom for atom in variables(eqn.invars) if atom in made] or list(made)
                        waits, after = _all_of([*products, *own[-1:]], eqn.source_info)
                        eqns += [*waits, *self._copied(segment, after)]
                        products = []
                        waiting = {var: each for var, each in waiting.items() if each is not segment}
                if eqn.outvars and all(self._numbers[var] in self.gathered for var in eqn.outvars):
                    self.merged |= {var: self.gathered[self._numbers[var]] for var in eqn.outvars}
                    continue
                names = {atom: self.again[source] for atom, source in sources.items() if source in self.again}
                eqn = with_renamed_operands(eqn, names)
                products += eqn.outvars[:1] if eqn.primitive.name in PRODUCTS else []
                made |= dict.fromkeys(var for var in eqn.outvars if has_numbers(var) and not is_drop_var(var))
            eqns.append(eqn)
        outvars = [renamed(atom, self.merged) for atom in flat.outvars]
        return flat.replace(eqns=slim_barriers(eqns, outvars), outvars=outvars)

    def _copied(self, segment: Sequence[int], after: Any) -> Iterator[Any]:
        """The equations of ``segment`` with new variables; what they are given waits for ``after``."""
        tape, known = self.tape, dict[Any, Any]()
        for place in segment:
            eqn = tape.jaxpr.eqns[place]
            for atom in tape.operands(place):
                if atom not in known and has_numbers(atom):
                    given = [renamed(atom, self.merged), *([] if after is None else [after])]
                    yield (barrier := new_barrier(given, rematted(eqn.source_info)))
                    known[atom] = barrier.outvars[0]
            names = {atom: renamed(renamed(atom, tape.guarded), known) for atom in variables(eqn.invars)}
            outvars = [new_var(var.aval) for var in eqn.outvars]
            yield with_renamed_operands(eqn, names).replace(outvars=outvars, source_info=rematted(eqn.source_info))
            known |= zip(eqn.outvars, outvars, strict=True)
            self.gathered |= {self._numbers[var]: known[var] for var in eqn.outvars if var in tape.cheap}
        made = {var for place in segment for var in tape.jaxpr.eqns[place].outvars}
        self.again |= {var: known[var] for var in made - tape.cheap.keys()}


def _all_of(values: Sequence, source_info: Any) -> tuple[list, Any]:
    """The last of ``values`` once all are there, and the equations that wait for them; None if there are none."""
    *others, last = values or [None]
    waits = []
    for other in others:
        waits.append(new_barrier([last, other], source_info))
        last = waits[-1].outvars[0]
    return waits, last


def _segments(tape: Tape, kept: Collection) -> dict[Any, tuple[int, ...]]:
    """The equations to compute again for each value that is not ``kept``, the same for those that hang together."""
    wanted = tape.before(kept)
    places = tape.needed(wanted, kept)
    own = tape.without_cheap(places)
    found = DisjointSet(own)
    for place in own:
        for var in tape.operands(place):
            maker = tape.makers.get(var)
            if maker is None or maker not in found or var in kept:
                continue
            if tape.pass_of(maker) == tape.pass_of(place):
                found.merge(place, maker)
    segments = {}
    for together in found.subsets():
        targets = [var for var in wanted if tape.makers[var] in together]
        segment = tuple(tape.needed(targets, kept))
        segments |= dict.fromkeys(targets, segment)
    return segments
