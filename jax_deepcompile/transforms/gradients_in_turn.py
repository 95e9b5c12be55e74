"""Gradients of parameters are computed where backward comes by, before it goes on.

XLA schedules from the end of the program backwards. What only the update reads comes as late as that allows, and until
then all is held that it is computed of: what a layer was given, and the gradient that came to it.

Before::

    p2 = dot(x2, y3); y2 = dot(y3, W2); p1 = dot(x1, y2); y1 = dot(y2, W1); ... update(p2, p1)

After::

    p2 = dot(x2, y3); y2 = dot(y3, W2); p1 = dot(x1, y2); y2', p2' = barrier(y2, p2); y1 = dot(y2', W1); ...

Both results of a barrier are read: XLA drops an operand that is guarded for nobody.

Guarantees: values are bitwise the same; nothing is computed more or less often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax_deepcompile._jax_compat import is_drop_var, new_barrier, open_jaxpr
from jax_deepcompile.analysis.dataflow import needed_for, variables
from jax_deepcompile.analysis.loops import find_loops
from jax_deepcompile.analysis.names import phase
from jax_deepcompile.analysis.segments import Tape, has_numbers
from jax_deepcompile.analysis.work import is_anchor
from jax_deepcompile.ir.memory import size_bytes
from jax_deepcompile.ir.placement import AnyMesh
from jax_deepcompile.ir.program import Program
from jax_deepcompile.ir.rewrite import Walk, renamed, with_renamed_operands
from jax_deepcompile.transforms.decision import Decision, refused, replace_bodies


@dataclass(frozen=True)
class GradientsInTurn(Decision, kind="gradients_in_turn", about=("where",)):
    """Backward waits for gradients of parameters.

    Attributes:
      where: the loop whose iterations have forward and backward, as those over microbatches do; empty for what is
        outside of loops.
      waiting_bytes: what may be held for such gradients before backward waits for them; 0 for it to wait in each
        product.
    """

    where: str
    waiting_bytes: int

    def check(self, program: Program) -> None:
        if self.waiting_bytes < 0:
            raise refused(f"gradients wait with {self.waiting_bytes} bytes")

    def describe(self) -> str:
        where = self.where or "outside of loops"
        return f"{where}: backward waits for gradients that hold {self.waiting_bytes / 2**20:.0f} MiB"

    @staticmethod
    def apply(program: Program, mesh: AnyMesh, decisions: Sequence[GradientsInTurn]) -> Program:
        sizes = {each.where: each.waiting_bytes for each in decisions}

        def in_turn(jaxpr: Any, where: str) -> Any:
            return _in_turn(open_jaxpr(jaxpr), sizes[where])

        return replace_bodies(program, mesh, sizes, "has gradients wait in", in_turn)


def bodies_with_gradients(program: Program) -> Iterator[str]:
    """The loops in whose iterations layers have forward and backward, one by one; empty for outside of loops."""
    bodies = {"": program.jaxpr} | {loop.name: loop.scan.closed for loop in find_loops(program)}
    for where, jaxpr in bodies.items():
        flat = open_jaxpr(jaxpr)
        if Tape(flat).left and len(list(_waits(flat, 0))) >= _LAYERS:
            yield where


_LAYERS = 4
"""So many products wait for more than gradients of embeddings and heads."""


class _Wait(NamedTuple):
    """A product of backward that waits.

    Attributes:
      place: of its equation.
      operand: what comes to it.
      gradients: what it waits for.
    """

    place: int
    operand: Any
    gradients: tuple


def _in_turn(jaxpr: Any, waiting_bytes: int) -> Any:
    """``jaxpr`` with its barriers; what reads a gradient comes after the one that waits for it."""
    waits = {each.place: each for each in _waits(jaxpr, waiting_bytes)}
    awaited = {gradient for each in waits.values() for gradient in each.gradients}
    walk, behind, later = Walk(jaxpr), list[Any](), set[Any]()
    for place, eqn in enumerate(walk):
        if place in waits:
            wait, now = waits[place], partial(renamed, names=walk.names)
            barrier = new_barrier([now(wait.operand), *wait.gradients], eqn.source_info)
            walk.names |= zip(wait.gradients, barrier.outvars[1:], strict=True)
            walk.eqns += [barrier, *(with_renamed_operands(each, walk.names) for each in behind)]
            eqn, behind, later = with_renamed_operands(eqn, {barrier.invars[0]: barrier.outvars[0]}), [], set()
        if later.isdisjoint(variables(eqn.invars)):
            walk.eqns.append(eqn)
            later.update(awaited.intersection(eqn.outvars))
        else:
            behind.append(eqn)
            later.update(eqn.outvars)
    walk.eqns += behind
    return walk.result()


def _waits(jaxpr: Any, waiting_bytes: int) -> Iterator[_Wait]:
    """Each product that backward goes on by and that comes after gradients which hold ``waiting_bytes`` or more."""
    eqns, cheap = jaxpr.eqns, Tape(jaxpr).cheap
    backward = [phase(eqn) == " @backward" for eqn in eqns]
    products = (eqn for is_later, eqn in zip(backward, eqns, strict=True) if is_later and is_anchor(eqn))
    goes_on = set(map(id, needed_for(eqns, [atom for eqn in products for atom in eqn.invars], effects=False)))
    coming, aside, held = set[Any](), set[Any](), dict[Any, int]()
    gradients: list[Any] = []
    for place, eqn in enumerate(eqns):
        if not backward[place]:
            continue
        read = [var for var in variables(eqn.invars) if has_numbers(var) and var not in cheap]
        if id(eqn) not in goes_on:
            fresh = [var for var in read if var not in aside]
            is_gradient = _is_gradient(eqn, fresh)
            if is_gradient:
                gradients.append(eqn.outvars[0])
                held |= {var: size_bytes(var) for var in fresh}
            if is_gradient or not fresh:
                aside.update(eqn.outvars)
            continue
        operand = next((var for var in read if var in coming), None)
        coming.update(eqn.outvars)
        if is_anchor(eqn) and operand is not None and gradients and sum(held.values()) >= waiting_bytes:
            yield _Wait(place, operand, tuple(gradients))
            gradients, held = [], {}


def _is_gradient(eqn: Any, fresh: Sequence) -> bool:
    """Whether what lies aside of backward's way is made of ``fresh``, by work that leaves less than it reads."""
    if not fresh or not eqn.outvars or is_drop_var(eqn.outvars[0]) or not has_numbers(eqn.outvars[0]):
        return False
    return is_anchor(eqn) or 2 * sum(map(size_bytes, eqn.outvars)) <= max(map(size_bytes, fresh))
